"""Which loaders give the same batches in the same order each time they are iterated, and which do not.

In: any iterable that gives batches. Out: ConfigError (key `loader`) for one whose order cannot be reproduced, and the
objects inside it that take an epoch or draw random numbers. A rank that starts again must read the batches that were read
before, so an order that depends on unseeded numbers or on timing is refused at the start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from helixrt.errors import ConfigError
from helixrt.job.data_random import seed_generators
from helixrt.job.sampler import StreamSampler

_ORDER_ITEMS, _ORDERED_TWICE = 1000, 1_000_000  # how much of two orders is compared, of samplers of up to so many items
_DRAWN_SEED = 1 << 32  # torchdata's RandomSampler draws a seed of 63 bits where it is given no generator


def check_reproducible(loader: Any) -> None:
    """Raise ConfigError unless `loader` can be iterated again, and its order does not depend on chance."""
    name = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        raise ConfigError("loader", name, "is not iterable")
    if hasattr(loader, "__next__"):
        rule = "can be iterated once only; give an object that begins anew each time: a DataLoader, a list"
        raise ConfigError("loader", name, rule)
    for sampler in _parts(loader):
        if _unseeded(loader, sampler) or _varies(loader, sampler):
            rule = "has an unseeded order; use sampler=session.sampler(dataset, shuffle=True), or give it a seeded generator"
            raise ConfigError("loader", f"{name} with {type(sampler).__name__}", rule)
    workers = getattr(loader, "num_workers", 0)
    if workers and getattr(loader, "in_order", True) is False:
        rule = "gives batches in the order of their arrival; use in_order=True"
        raise ConfigError("loader", f"{name} with in_order=False", rule)
    kept = workers and getattr(loader, "persistent_workers", False)
    if kept and any(hasattr(part, "set_epoch") for part in _of_data(loader)):
        rule = "its workers keep a copy of the data set, which set_epoch does not reach; use persistent_workers=False"
        raise ConfigError("loader", f"{name} with persistent_workers=True", rule)


def _unseeded(loader: Any, sampler: Any) -> bool:
    if not hasattr(sampler, "generator") or sampler is loader:
        return False
    if sampler.generator is None:
        return True
    made_here = getattr(loader, "generator", None) is None and type(sampler).__module__.startswith("torchdata.")
    return made_here and sampler.generator.initial_seed() >= _DRAWN_SEED


def _varies(loader: Any, sampler: Any) -> bool:
    """Whether two copies of a sampler of the user's own give different orders after the same seeds, as one does that draws from
    a generator which the operating system has seeded."""
    if _restorable(sampler) or sampler is loader or _len_of(sampler) > _ORDERED_TWICE:
        return False
    dataset, orders = getattr(loader, "dataset", None), []
    for _ in range(2):
        seed_generators(0)
        try:
            own = copy.deepcopy(sampler, {id(dataset): dataset})
            orders.append([repr(each) for each in islice(own, _ORDER_ITEMS)])
        except Exception:  # of the user's code, or it cannot be copied: nothing is known
            return False
    return orders[0] != orders[1]


def _len_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        return 0


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to the loader, its samplers and its data set, as far as they have `set_epoch`."""
    for part in [loader, *_parts(loader), *_of_data(loader)]:
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def content_of(loader: Any) -> str:
    """What the loader says it reads: `content_digest`, a short text (a digest of the files, and the settings that cut them into
    batches), of itself or its data set; "" if it says nothing."""
    found = [getattr(part, "content_digest", "") for part in (loader, getattr(loader, "dataset", None))]
    return next((text for text in found if isinstance(text, str) and text), "")


def generators(loader: Any) -> list[torch.Generator]:
    """The random generators of the loader and its samplers, each once."""
    found = [getattr(part, "generator", None) for part in [loader, *_parts(loader)]]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def stateful(loader: Any) -> bool:
    """Whether its position can be saved and restored (StatefulDataLoader, or the same two methods).

    Not for an IterableDataset without `state_dict`: torchdata 0.11 restores it by reading from the start, and counts what it
    skipped twice in the next state. Nor with a sampler of the user's own without one, which may draw another order then.
    """
    data = getattr(loader, "dataset", None)
    own = [part for part in _parts(loader) if not _has_state(part) and not _restorable(part)]
    return _has_state(loader) and not own and (_has_state(data) or not isinstance(data, IterableDataset))


def _restorable(sampler: Any) -> bool:
    """A sampler of torch, torchdata or the session, whose order follows from what it is made of."""
    return isinstance(sampler, StreamSampler) or type(sampler).__module__.split(".")[0] in ("torch", "torchdata")


def orders_itself(loader: Any) -> bool:
    """Whether code of the user's own chooses the order of the items, when the first one is asked for."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return True
    return not all(_restorable(part) for part in _parts(loader))


def keeps_position(loader: Any) -> bool:
    """Whether the data set has a position of its own, so that iterating it again need not begin anew."""
    return _has_state(getattr(loader, "dataset", None))


def reads_all_items(loader: Any) -> bool:
    """Whether it is a DataLoader that reads the whole of a data set with a length, by a sampler that torch chose."""
    dataset = getattr(loader, "dataset", None)
    sampler = getattr(loader, "sampler", None)
    chosen = type(sampler).__name__ in ("SequentialSampler", "RandomSampler") and type(sampler).__module__.split(".")[0] in (
        "torch",
        "torchdata",
    )
    return isinstance(loader, DataLoader) and chosen and not isinstance(dataset, IterableDataset)


def dealt_by(loader: Any) -> tuple[StreamSampler, int] | None:
    """The session's sampler that says which items the loader reads, in which order, and how many make a batch. None for a
    loader that reads others: what is left of its data cannot be dealt over another number of streams."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if not isinstance(sampler, StreamSampler) or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    if batches is None:
        return sampler, 1
    return (sampler, int(batches.batch_size)) if _plain_batches(batches) else None


def check_last_batches(loader: Any, microbatches: int, fixed_shape: bool) -> None:
    """Raise ConfigError for a loader that ends an epoch with a smaller batch which cannot be cut into micro-batches, or which
    has another shape where all must have one: a run would end with it. Of other loaders than DataLoader nothing is known."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not _plain_batches(batches) or batches.drop_last:
        return
    sampler = batches.sampler
    try:
        lengths = sampler.lengths if isinstance(sampler, StreamSampler) else (len(sampler),)
    except (TypeError, NotImplementedError):
        return
    for items in sorted({length % batches.batch_size for length in lengths} - {0}):
        if fixed_shape or items % microbatches:
            cannot = "has another shape" if fixed_shape else f"cannot be cut into {microbatches} equal micro-batches"
            rule = f"ends an epoch with a batch of {items} items, which {cannot}; use drop_last=True"
            raise ConfigError("loader", f"{name_of(loader)}, batch_size={batches.batch_size}", rule)


def workers_of(loader: Any) -> int | None:
    """How many copies of an IterableDataset are read in turn, on which the order of batches depends; None where it does not."""
    if not isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    return max(1, int(getattr(loader, "num_workers", 0)))


def name_of(loader: Any) -> str:
    """The loader with what chooses its items, for messages."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or batches or getattr(loader, "sampler", None)
    dataset = getattr(loader, "dataset", None)
    own = type(dataset if sampler is None or isinstance(dataset, IterableDataset) else sampler).__name__
    return type(loader).__name__ if own == "NoneType" else f"{type(loader).__name__} with {own}"


def _plain_batches(sampler: Any) -> bool:
    """Whether batches are made by torch's own rule: so many items, one after the other."""
    return type(sampler).__name__ == "BatchSampler" and type(sampler).__module__.split(".")[0] in ("torch", "torchdata")


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _of_data(loader: Any) -> Iterator[Any]:
    """Its data set, and what is inside of a pipeline of webdataset."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None:
        yield dataset
    for pipeline in (loader, dataset):
        stages = getattr(pipeline, "pipeline", None)
        for stage in stages if isinstance(stages, list) else ():
            yield stage
            yield from _of_data(stage)


def _parts(loader: Any) -> Iterator[Any]:
    """The samplers of a DataLoader: sampler, batch sampler, and the sampler of the batch sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    seen: set[int] = set()
    for part in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
