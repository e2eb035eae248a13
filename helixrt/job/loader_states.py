"""States of a stream's loader, published in the run's store so that a replica that starts again need not read from the start.

In: (epoch, batches of it that were read, what the loader's `state_dict` gave). Out: the newest state of an epoch at or before a
batch. For a loader only a shortcut: without any state a stream reads its epoch from the beginning and skips, with the same
result. `per_replica` keeps states here that are more than that.

Keys: `loader/STREAM` lists the places of the newest states, oldest first; `loader/STREAM/EPOCH/OFFSET` is a state, as torch
saves it, in base64. There is one writer, the living incarnation of the replica. With a folder the states are files there as
well, for a run that is resumed: its store is a new one. A thread writes them, since a storage may take long to answer.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from helixrt.errors import Retryable
from helixrt.job.lineage_files import write_durably
from helixrt.replica.contracts import RunStore

KEPT = 4  # newest states; a record is superseded by few steps, and loader states are many steps apart
LIMIT_BYTES = 4 << 20  # of one state in the store
FLUSH_S = 30.0

Place = tuple[int, int]  # (epoch, batches of it that were read)


class LoaderStates:
    """Of one stream, named by `stream` (replica/shard); the newest `keep`. One thread at a time. `what` has the states, for
    messages."""

    def __init__(
        self,
        store: RunStore,
        stream: str,
        say: Callable[[str], None],
        folder: Path | None = None,
        what: str = "the data loader",
        effect: str = "a replica that starts again reads its epoch from the beginning",
        keep: int = KEPT,
    ) -> None:
        self._store, self._key, self._say, self._what, self._effect = store, f"loader/{stream}", say, what, effect
        self._keep = keep
        self._folder = None if folder is None else folder / "streams" / stream.replace("/", ".")
        self._mine: dict[Place, bytes] = {}  # packed states of this process
        self._said = self._said_unwritten = False
        self._changed = threading.Condition()  # guards what follows
        self._waiting: list[tuple[Place, str]] = []  # to be written into the folder, oldest first
        self._writer: threading.Thread | None = None  # as long as there is something to write

    def put(self, place: Place, state: dict[str, Any]) -> None:
        """`state` continues at `place`; states of later places are given up. Kept are the newest states and that of the start
        of this epoch. An unreachable store, or a folder that cannot be written, is no failure: the state is kept here."""
        content = packed(state)
        if content is None:
            self._cannot_publish("holds objects that torch.load(weights_only=True) refuses")
            return
        self._mine = {p: kept for p, kept in self._mine.items() if p < place} | {place: content}
        self._mine = {p: self._mine[p] for p in self._to_keep(self._mine, place[0])}
        encoded = base64.b64encode(content).decode()
        if self._folder is not None:
            self._begin_to_write(place, encoded)
        if len(content) > LIMIT_BYTES:
            if self._folder is None:
                self._cannot_publish(f"has {len(content)} bytes, more than {LIMIT_BYTES}")
            return
        with suppress(Retryable):
            known = self._places()
            kept = self._to_keep({p for p in known if p < place} | {place}, place[0])
            self._store.set(self._key_of(place), encoded)
            self._store.set(self._key, json.dumps(kept))
            for old in set(known) - set(kept):
                self._store.delete(self._key_of(old))

    def newest(self, place: Place) -> tuple[int, dict[str, Any]] | None:
        """The newest state of this epoch at or before `place`, and its offset; None without one. Raises Retryable if the
        store cannot be reached."""
        epoch = place[0]
        files = self._files()
        for found in sorted({p for p in (*self._mine, *files, *self._places()) if p[0] == epoch and p <= place}, reverse=True):
            if found in self._mine:
                return found[1], _unpack(self._mine[found])
            if found in files:
                with suppress(OSError, ValueError):  # deleted meanwhile, or damaged
                    return found[1], _unpack(base64.b64decode(files[found].read_text(encoding="ascii"), validate=True))
            if (text := self._store.get(self._key_of(found))) is not None:
                return found[1], _unpack(base64.b64decode(text))
        return None

    def flush(self, limit_s: float = FLUSH_S) -> None:
        """Wait until the folder has all states, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._writer is None, limit_s)

    def _begin_to_write(self, place: Place, encoded: str) -> None:
        with self._changed:
            waiting = [(p, text) for p, text in self._waiting if p < place] + [(place, encoded)]
            kept = self._to_keep((p for p, _ in waiting), place[0])
            self._waiting = [each for each in waiting if each[0] in kept]
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="helixrt-loader-states", daemon=True)
                self._writer.start()

    def _write_all(self) -> None:
        assert self._folder is not None
        while True:
            with self._changed:
                if not self._waiting:
                    self._writer = None
                    self._changed.notify_all()
                    return
                place, encoded = self._waiting.pop(0)
            try:
                self._write(self._folder, place, encoded)
            except Exception as error:  # of the storage, or of a file that is none of these
                if not self._said_unwritten:
                    self._say(f"the state of {self._what} could not be written to {self._folder}: {error}; the store has it")
                self._said_unwritten = True
            else:
                self._said_unwritten = False

    def _cannot_publish(self, why: str) -> None:
        if not self._said:
            self._say(f"the state of {self._what} {why}, so it is not published: {self._effect}")
        self._said = True

    def _write(self, folder: Path, place: Place, encoded: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / f"{place[0]}_{place[1]}", encoded)
        files = self._files()
        kept = self._to_keep({p for p in files if p <= place}, place[0])
        for old in set(files) - set(kept):
            files[old].unlink(missing_ok=True)

    def _files(self) -> dict[Place, Path]:
        if self._folder is None or not self._folder.is_dir():
            return {}
        found = {path: path.name.split("_") for path in self._folder.iterdir()}
        places = {path: numbers for path, numbers in found.items() if len(numbers) == 2 and all(map(str.isdigit, numbers))}
        return {(int(epoch), int(offset)): path for path, (epoch, offset) in places.items()}

    def _to_keep(self, places: Iterable[Place], epoch: int) -> list[Place]:
        known = sorted(places)
        return [p for p in known if p == (epoch, 0) or p in known[-self._keep :]]

    def _key_of(self, place: Place) -> str:
        return f"{self._key}/{place[0]}/{place[1]}"

    def _places(self) -> list[Place]:
        text = self._store.get(self._key)
        return [] if text is None else [(int(epoch), int(offset)) for epoch, offset in json.loads(text)]


def packed(state: dict[str, Any]) -> bytes | None:
    """As bytes that load without unpickling objects of any class; None if it holds others."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        _unpack(buffer.getvalue())
    except Exception:  # pickle and torch raise many kinds
        return None
    return buffer.getvalue()


def _unpack(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), weights_only=True)
