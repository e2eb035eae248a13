"""The random state of a micro-batch: a function of seed, replica and position, so that a batch that is begun again draws
the same numbers, whatever was drawn in between.

It sets the default generators of torch (CPU and accelerators), Python's `random`, and NumPy's if NumPy is imported.
"""

from __future__ import annotations

import hashlib
import random
import sys
from functools import cache
from typing import Any

import torch


def micro_batch_seed(seed: int, replica: int, dp_shard: int, position: int) -> int:
    """63 bits that follow from the run's seed, the stream (replica and dp_shard rank) and the stream's position."""
    digest = hashlib.blake2b(f"{seed} {replica} {dp_shard} {position}".encode(), digest_size=8, person=b"helixrt-random")
    return int.from_bytes(digest.digest(), "little") >> 1


def set_random_state(seed: int, replica: int, dp_shard: int, position: int) -> None:
    number = micro_batch_seed(seed, replica, dp_shard, position)
    torch.default_generator.manual_seed(number)  # torch.manual_seed asks every backend: a hundred times slower
    device = _accelerator()
    if device is not None:
        device.manual_seed_all(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def random_states() -> tuple[object, ...]:
    """What the next numbers depend on, to be compared: equal as long as nobody has drawn any."""
    device, numpy = _accelerator(), sys.modules.get("numpy")
    states = [torch.default_generator.get_state()] + ([] if device is None else [device.get_rng_state()])
    found: list[object] = [state.cpu().numpy().tobytes() for state in states] + [random.getstate()]
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found += [kind, keys.tobytes(), *rest]
    return tuple(found)


@cache
def _accelerator() -> Any:
    """torch's module for the accelerator of this machine; None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)
