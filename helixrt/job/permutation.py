"""Permutations that are functions of integer keys alone, on every version of every library.

In: a length and keys. Out: an array of indices. No state of any random generator is read or changed.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1


def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of 0..n-1 as an int64 array, determined by `key`. Negative keys count modulo 2**64."""
    with np.errstate(over="ignore"):
        return np.argsort(mix(mix(np.arange(n, dtype=np.uint64) + np.uint64(_salt(key)))), kind="stable")


def seed_of(*key: int) -> int:
    """A seed of 63 bits that is determined by `key`; different keys give unrelated seeds."""
    return _mix_one(_salt(key)) >> 1


def _salt(key: tuple[int, ...]) -> int:
    salt = 0
    for part in key:
        salt = _mix_one(salt + part)
    return salt


def _mix_one(x: int) -> int:
    """`mix` of one number modulo 2**64; on a single number Python is far quicker than an array."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014) of an array of uint64: a bijection that spreads every bit."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
