"""The random state of a micro-batch: a function of seed, replica and position, so that a batch that is begun again draws
the same numbers, whatever was drawn in between.

It sets the default generators of torch (CPU and accelerators), Python's `random`, and NumPy's if NumPy is imported.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def micro_batch_seed(seed: int, replica: int, dp_shard: int, position: int) -> int:
    """63 bits that follow from the run's seed, the stream (replica and dp_shard rank) and the stream's position."""
    digest = hashlib.blake2b(f"{seed} {replica} {dp_shard} {position}".encode(), digest_size=8, person=b"helixrt-random")
    return int.from_bytes(digest.digest(), "little") >> 1


def set_random_state(seed: int, replica: int, dp_shard: int, position: int) -> None:
    _set(micro_batch_seed(seed, replica, dp_shard, position))


@contextmanager
def chunks_apart() -> Iterator[Callable[[int, int], None]]:
    """Around a pass over chunks. Gives what sets the random state before the forward of (chunk, micro-batch): each draws
    numbers of its own, whatever the order of the schedule and wherever the chunk is. Behind it the random state is one that
    depends on that before it alone, equal on ranks where it was equal."""
    base = int(torch.randint(1 << 62, (), device="cpu"))
    after = _states()

    def begin(chunk: int, microbatch: int) -> None:
        digest = hashlib.blake2b(f"{base} {chunk} {microbatch}".encode(), digest_size=8, person=b"helixrt-chunk")
        _set(int.from_bytes(digest.digest(), "little") >> 1)

    try:
        yield begin
    finally:
        _put_back(after)


def _set(number: int) -> None:
    torch.default_generator.manual_seed(number)  # torch.manual_seed asks every backend: a hundred times slower
    device = _accelerator()
    if device is not None:
        device.manual_seed_all(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def random_states() -> tuple[object, ...]:
    """The states of all generators, to be compared: equal if no number was drawn in between. The accelerator's state is the
    last one; before the first use of the accelerator there is none."""
    own, numpy = _accelerator_state(), sys.modules.get("numpy")
    found: list[object] = [torch.default_generator.get_state().numpy().tobytes(), random.getstate()]
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found += [kind, keys.tobytes(), *rest]
    return tuple(found) if own is None else (*found, own.cpu().numpy().tobytes())


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        _accelerator_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def _put_back(states: tuple[Any, ...]) -> None:
    cpu, accelerator, own, numpys = states
    torch.default_generator.set_state(cpu)
    if accelerator is not None:
        _accelerator().set_rng_state(accelerator)
    random.setstate(own)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)


def _accelerator_state() -> torch.Tensor | None:
    """None where this process has not used the accelerator, and drawn nothing there: asking would make a context on it."""
    device = _accelerator()
    return device.get_rng_state() if device is not None and device.is_initialized() else None


@cache
def _accelerator() -> Any:
    """torch's module for the accelerator of this machine; None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)
