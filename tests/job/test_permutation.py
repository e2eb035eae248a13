"""Seeds of integer keys: the same numbers as splitmix64 gives on arrays."""

from __future__ import annotations

import random

import numpy as np

from helixrt.job.permutation import mix, seed_of


def by_arrays(*key: int) -> int:
    salt = np.zeros(1, dtype=np.uint64)
    for part in key:
        with np.errstate(over="ignore"):
            salt = mix(salt + np.uint64(part % 2**64))
    return int(mix(salt)[0] >> np.uint64(1))


def test_a_seed_is_that_of_the_mixer_on_arrays(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        key = [rng.choice([rng.randrange(-(2**63), 2**64), rng.randrange(-3, 50)]) for _ in range(rng.randrange(6))]
        assert seed_of(*key) == by_arrays(*key), key
