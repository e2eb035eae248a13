"""A stream: the batches of one replica, by position, over any loader of the user.

In: a loader (an iterable that begins anew each time: DataLoader, StatefulDataLoader, a list, with or without `__len__`). Out:
the `accumulate` batches from a position on. A position counts what the stream yields; the commit record carries it (DESIGN.md,
"Data"). With `usable` the batches of an epoch, rounded down to groups of `accumulate`:

    epoch = position // usable        batch of that epoch = position % usable

In a run that was resumed with another number of streams, epoch 0 may be the remainder of before (`dealing`), which is shorter.

The same position gives the same batch in each incarnation of the replica: orders that depend on chance are refused
(`loader_checks`), and batches that are not committed stay in memory and are yielded again. Generators and random numbers are
set from (seed, stream, position), but for an epoch's begin where the order is the user's own: there from (seed, epoch), on all
streams alike, so that each may shuffle all items and take its share. A replica that starts again begins at the newest loader
state at or before its position (`loader_states`) and skips forward from there; the batches of the step before are read for
their digest, which the record has (`batch_digest`). Follows FT-HSDP section 4.4.

Limit: random numbers that a *worker process* of the loader draws depend on what that worker read before, so after a restored
state they may differ. Transformations that must be reproducible derive their numbers from the item's index.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from helixrt.errors import ConfigError, Fatal, MisuseError, StartAgain
from helixrt.job.batch_digest import Digest, batch_digest, together
from helixrt.job.data_random import seed_generators
from helixrt.job.kept_batch import KeptBatch
from helixrt.job.loader_checks import (
    check_reproducible,
    content_of,
    dealt_by,
    generators,
    keeps_position,
    name_of,
    orders_itself,
    set_epoch,
    stateful,
    workers_of,
)
from helixrt.job.loader_states import LoaderStates
from helixrt.job.permutation import seed_of
from helixrt.job.sampler import StreamSampler
from helixrt.protocol.step.deal import Deal
from helixrt.replica.contracts import RunStore
from helixrt.replica.rank_parts import BatchNote

LENGTH_KEY = "loader/length"  # what all streams of the run must agree on
ACCUMULATE_KEY = "loader/accumulate"  # the same; known before the length of a loader that has none
RESUMED = "the run that is resumed"  # in place of a stream's name
UNREAD_KEY = "loader/unread"  # put by the stream that has said which batches are not compared
_AGREED = {  # what all streams have alike, and how messages name it
    "batch": "batch_size",
    "items": "items",
    "shuffle": "shuffle",
    "workers": "num_workers",
    "content": "content_digest",
    "accumulate": "accumulate",
    "batches": "batches per epoch",
}
_EPOCH, _BATCH, _GENERATOR = 1, 2, 3  # what a seed is for
_WORKERS = "helixrt/num_workers"  # in a state: of the loader that gave it


@dataclass(frozen=True)
class StreamSettings:
    """Whose stream it is, and how it is read. `accumulate`: micro-batches per step; `every`: batches between two published
    loader states."""

    replica: int
    accumulate: int = 1
    seed: int = 0
    every: int = 100
    shard: int = 0  # dp_shard rank; streams of one replica share the position
    deals: tuple[Deal, ...] = ()  # changes of the number of streams before this life of the run

    @property
    def name(self) -> str:
        return f"{self.replica}/{self.shard}"


class _Ended(Exception):
    """The first epoch of a loader without a length has ended: now the length is known."""


class Stream:
    """One thread at a time. Raises ConfigError (loader, accumulate) at the start for a loader that cannot be used, MisuseError
    for one that does not read as those of the other streams do, or not as before a resume.

    `store` is the run's; `say` gets the messages for the user, each once. States of the loader are kept in the run's `folder`
    as well, for a run that is resumed.
    """

    def __init__(
        self,
        loader: Any,
        settings: StreamSettings,
        store: RunStore,
        say: Callable[[str], None] = lambda text: None,
        folder: Path | None = None,
    ) -> None:
        if settings.accumulate < 1:
            raise ConfigError("accumulate", settings.accumulate, "must be at least 1")
        check_reproducible(loader)
        self._loader, self._settings, self._store, self._say = loader, settings, store, say
        self._generators = [(g, g.get_state()) for g in generators(loader)]
        self._stateful = stateful(loader)
        self._kept: dict[int, KeptBatch] = {}  # by position, those that may be yielded again
        self._uncopied = False  # the user was told of a batch that cannot be copied
        self._unread = False  # the user was told of a batch that cannot be compared
        self._iterator: Iterator[Any] | None = None
        self._begun = False  # the loader was iterated in this process
        self._at_begin = False  # nothing was read from the iterator, which is at the begin of an epoch
        self._next = -1  # position of the batch that the iterator gives next
        self._read_again: tuple[int, int] | None = None  # (position, digest) of the group before the first that was read
        self._length: int | None = None  # batches of an epoch
        self._remainder: int | None = None  # batches of epoch 0, if that is what was left when streams were dealt anew
        order = f"/{self._take_up().mark}" if settings.deals else ""  # of which states of the loader are
        self._states = LoaderStates(store, settings.name + order, say, folder)
        known = _len(loader)
        if known is not None:
            self._agree(known)
        first = store.put_if_absent(ACCUMULATE_KEY, str(settings.accumulate))
        if int(first) != settings.accumulate:
            rule = f"is {first} in the streams that began first, or in the run that is resumed; must be equal in all"
            raise ConfigError("accumulate", settings.accumulate, rule)

    @property
    def usable(self) -> int | None:
        """Batches of an epoch that are used: a multiple of `accumulate`. None while the length is not known."""
        if self._length is None:
            return None
        return self._length - self._length % self._settings.accumulate

    @property
    def first(self) -> int:
        """Batches of the remainder that are used; 0 without one."""
        return 0 if self._remainder is None else self._remainder - self._remainder % self._settings.accumulate

    def epoch_of(self, position: int) -> int:
        """The epoch of the batch at this position, from 0."""
        if self.usable is None or position < self.first:
            return 0
        return (self._remainder is not None) + (position - self.first) // self.usable

    def _begin_of(self, epoch: int) -> int:
        """The position of an epoch's first batch."""
        if epoch == 0 or self.usable is None:
            return 0
        return self.first + (epoch - (self._remainder is not None)) * self.usable

    def _length_of(self, epoch: int) -> int:
        """Batches of the epoch, those that are not used included."""
        assert self._length is not None
        return self._remainder if self._remainder is not None and epoch == 0 else self._length

    def take(self, position: int) -> Iterator[Any]:
        """The `accumulate` batches from `position` on. Batches before it are given up.

        Batches are read one by one as they are asked for, but for a loader of unknown length, where the whole group is read
        at once: it may turn out to be the incomplete last one.
        """
        for old in [p for p in self._kept if p < position]:
            del self._kept[old]
        group = range(position, position + self._settings.accumulate)
        if self._length is None:
            try:
                for at in group:
                    if at not in self._kept:
                        self._find(at)
            except _Ended:
                self._kept.clear()  # of the incomplete group: its positions are those of the next epoch's first batches
        return (self._batch(at) for at in group)

    def note(self, position: int, note: BatchNote) -> None:
        """Write down the digest of the `accumulate` batches from `position` on, which were given."""
        note.digest = together(self._kept[at].digest for at in range(position, position + self._settings.accumulate))
        note.read_again = self._read_again

    def close(self) -> None:
        """Give up the iterator, and with it the loader's workers. Idempotent."""
        self._states.flush()
        self._iterator = None
        self._kept.clear()

    # ---------------------------------------------------------------- one batch

    def _batch(self, position: int) -> Any:
        kept = self._kept.get(position)
        if kept is None or not kept.ready:
            kept = self._find(position)
        batch = kept.give()
        if kept.problem and not self._uncopied:
            self._uncopied = True
            self._say(f"{kept.problem}: a step that is repeated reads its batches again")
        return batch

    def _find(self, position: int) -> KeptBatch:
        """The batch at `position`, read from the loader; it is kept."""
        if position != self._next or self._iterator is None:
            self._seek(position)
        batch = self._read(position)
        kept = self._kept[position] = KeptBatch(batch, self._digest(position, batch))
        return kept

    def _digest(self, position: int, batch: Any) -> Digest:
        """Of what names the items where the session dealt them, whose transformations may be random. Else of the content."""
        dealt = dealt_by(self._loader)
        if dealt is None or self._length is None:
            unread: list[str] = []
            digest = batch_digest(batch, unread.append)
            if unread and not self._unread:
                self._say_unread(unread[0], isinstance(digest, int) and digest == 0)
            return digest
        epoch = self.epoch_of(position)
        sampler, size = dealt
        order = f"{sampler.items} {sampler.shuffle} {sampler.seed} {sampler.stream} {sampler.mark}"
        return batch_digest(f"{order} {epoch} {position - self._begin_of(epoch)} {size}")

    def _say_unread(self, kind: str, whole: bool) -> None:
        """Once in a run. `whole`: nothing else of the batch can be compared."""
        self._unread, mine = True, uuid.uuid4().hex
        if self._store.put_if_absent(UNREAD_KEY, mine) == mine:
            how = "nor between the ranks of a stream or after a restart"
            if not whole:
                how = "and between the ranks of a stream and after a restart by the rest alone"
            self._say(f"a batch holds {kind}, whose content is not read: such batches are not compared between streams, {how}")

    def _read(self, position: int) -> Any:
        """The next batch of the iterator, which is the one at `position`. Raises _Ended when the first epoch of a loader
        without a length has ended."""
        try:
            batch = self._advance(position)
        except StopIteration:
            self._iterator = None
            if self._length is not None:
                self._other_length(str(position - self._begin_of(self.epoch_of(position))))
            self._agree(position)
            self._next = self._known_usable()
            raise _Ended from None
        self._next = position + 1
        if self._length is not None and self.epoch_of(self._next) != (epoch := self.epoch_of(position)):
            self._end_epoch(epoch)
        elif self._next % self._settings.every == 0:
            self._publish()
        return batch

    def _advance(self, position: int) -> Any:
        assert self._iterator is not None
        if self._at_begin:  # it may draw its order now: on all streams alike, so that they can share the items out
            seed_generators(self._settings.seed, _EPOCH, self.epoch_of(position))
        else:
            self._seed(_BATCH, position)
        self._at_begin = False
        return next(self._iterator)

    def _end_epoch(self, epoch: int) -> None:
        """Exhaust the iterator: a data set with a position of its own begins again only after its end."""
        assert self._iterator is not None
        rest = self._length_of(epoch) - (self._next - self._begin_of(epoch))
        self._seed(_BATCH, self._next)
        for _ in range(rest + 1):
            if next(self._iterator, self) is self:
                break
        else:
            self._other_length(f"more than {self._length}")
        self._iterator = None

    # ---------------------------------------------------------------- lengths

    def _agree(self, length: int) -> None:
        """All streams of the run read alike; the first to say how decides. Whatever differs ends the run: every replica runs
        this program. Raises MisuseError."""
        content, whose = content_of(self._loader), f"stream {self._settings.name}"
        mine = {"batches": length, "accumulate": self._settings.accumulate, "stream": whose, **self._described()}
        mine |= {"content": content} if content else {}
        first = json.loads(self._store.put_if_absent(LENGTH_KEY, json.dumps(mine)))
        for key, name in _AGREED.items():
            now, was = content if key == "content" else mine.get(key), first.get(key)
            if None not in (now, was) and now != was:
                self._refuse(name, now, was, first["stream"])
        if length < self._settings.accumulate:
            rule = f"an epoch of the loader has {length} batches, fewer than one step takes"
            raise ConfigError("accumulate", self._settings.accumulate, rule)
        self._length = length
        if (rest := length % self._settings.accumulate) != 0:
            dropped = f"the last {rest} of {length} batches of each epoch are not used"
            self._say(f"{dropped}: a step takes accumulate={self._settings.accumulate}")

    def _refuse(self, name: str, now: object, was: object, whose: str) -> NoReturn:
        """Of what must be equal in all streams, and over a resume."""
        rule = "all streams must read equally many batches, and alike; use sampler=session.sampler(dataset), or drop_last=True"
        if whose == RESUMED:
            rule = f"a position counts batches, so items would be read twice or never; resume with {name}={was}"
            rule = f"{rule}, or begin a new run from its weights (`helixrt export`)"
        where = f"in stream {self._settings.name}, and {was} in {whose}"
        raise MisuseError(f"{name_of(self._loader)}: {name}={now} {where}: {rule}")

    def _described(self) -> dict[str, Any]:
        """What a later life must know to deal the rest of the data over another number of streams; else the loader's name."""
        dealt = dealt_by(self._loader)
        if dealt is None:
            workers = workers_of(self._loader)
            return {"loader": name_of(self._loader)} | ({} if workers is None else {"workers": workers})
        sampler, batch = dealt
        return {"items": sampler.items, "shuffle": sampler.shuffle, "batch": batch, "first": self.first}

    def _take_up(self) -> StreamSampler:
        """The streams were dealt anew: learn how long the remainder is. Gives the loader's sampler. Raises ConfigError for a
        loader whose order is not that of `session.sampler`, or of other data than before."""
        dealt, newest = dealt_by(self._loader), self._settings.deals[-1]
        if dealt is None or dealt[0].deals != self._settings.deals:
            before = f"{newest.items} items, shuffle={newest.shuffle}"
            rule = f"the run was resumed with another number of streams, so its loader must read session.sampler of {before}"
            found = name_of(self._loader) if dealt is None else f"{dealt[0].items} items, shuffle={dealt[0].shuffle}"
            raise ConfigError("loader", found, rule)
        if newest.accumulate != self._settings.accumulate:
            rule = f"the run that is resumed has {newest.accumulate}, and its records count with that"
            raise ConfigError("accumulate", self._settings.accumulate, rule)
        sampler = dealt[0]
        if sampler.rounds.before:
            set_epoch(self._loader, 0)
            self._remainder = len(self._loader)
            left = len(sampler.rounds.remainder)
            before = f"{left} items that the {newest.streams} streams of before had not read"
            self._say(f"{before} come first, dealt over {sampler.streams}")
        set_epoch(self._loader, sampler.rounds.before)
        return sampler

    def _other_length(self, found: str) -> NoReturn:
        """An epoch did not have as many batches as it should."""
        if _len(self._loader) is not None:
            raise Fatal(f"the loader has a length of {self._length} batches, and an epoch had {found}")
        self._refuse(_AGREED["batches"], found, self._length, "the others")

    def _known_usable(self) -> int:
        assert self.usable is not None
        return self.usable

    # ---------------------------------------------------------------- finding a position

    def _seek(self, position: int) -> None:
        """Place the iterator before the batch at `position`."""
        self._learn_length()
        epoch = self.epoch_of(position)
        first = self._begin_of(epoch)
        before = position - self._settings.accumulate
        again = range(before if not self._begun and before >= first else position, position)
        self._iterator = None  # ends the workers of the iteration before
        found = self._newest((epoch, again.start - first)) if self._stateful else None
        if found is None and self._begun and self._next != first and keeps_position(self._loader):
            raise StartAgain(f"the data set keeps a position, and has no state at or before batch {position} to go back to")
        self._begin(epoch, found[1] if found is not None else None, found is None or found[0] == 0)
        self._next = first + found[0] if found is not None else first
        if self._next == first and found is None and self._stateful:
            self._publish()
        if (skipped := position - self._next) > 0:
            self._say(f"skips {skipped} batches to batch {position} (epoch {epoch})")
        digests: list[Digest] = []
        while self._next < position:
            try:
                batch = self._advance(self._next)
            except StopIteration:
                text = f"the loader ended at batch {self._next}, before batch {position}, which this run has used"
                raise Fatal(text) from None
            if self._next in again:
                digests.append(self._digest(self._next, batch))
            self._next += 1
        if again:
            self._read_again = position, int(together(digests))

    def _newest(self, place: tuple[int, int]) -> tuple[int, dict[str, Any]] | None:
        """The newest state at or before this place, if the loader can take it: torchdata's takes one of as many workers alone.
        Raises ConfigError (num_workers) if it cannot, and the data set cannot be read from the beginning."""
        found, workers = self._states.newest(place), _workers(self._loader)
        if found is None:
            return None
        then = found[1].pop(_WORKERS, workers)
        if then == workers:
            return found
        if keeps_position(self._loader):
            raise ConfigError("num_workers", workers, f"the run was begun with {then}, and its data set keeps a position")
        self._say(f"the loader has {workers} workers, and its states are of {then}: the epoch is read from its beginning")
        return None

    def _learn_length(self) -> None:
        if self._length is None and (text := self._store.get(LENGTH_KEY)) is not None:
            self._agree(json.loads(text)["batches"])

    def _begin(self, epoch: int, state: dict[str, Any] | None, at_begin: bool) -> None:
        set_epoch(self._loader, epoch)
        for index, (generator, initial) in enumerate(self._generators):
            generator.set_state(initial)
            if epoch > 0:  # its state after the epochs before is not known in a new process
                generator.manual_seed(seed_of(generator.initial_seed(), _GENERATOR, index, epoch))
        if state is not None:
            self._loader.load_state_dict(state)
        seed_generators(self._settings.seed, _EPOCH, epoch)
        self._iterator, self._at_begin = iter(self._loader), at_begin and orders_itself(self._loader)
        self._begun = True

    def _seed(self, what: int, number: int) -> None:
        seed_generators(self._settings.seed, self._settings.replica, self._settings.shard, what, number)

    def _publish(self) -> None:
        if self._stateful:
            epoch = self.epoch_of(self._next)
            state = {**self._loader.state_dict(), _WORKERS: _workers(self._loader)}
            self._states.put((epoch, self._next - self._begin_of(epoch)), state)


def _workers(loader: Any) -> int:
    return int(getattr(loader, "num_workers", 0))


def _len(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
