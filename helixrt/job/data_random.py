"""Random numbers while data are read: determined by seed, stream and position, so that a batch read again is the same.

In: integer keys. Out: the process's generators of Python, NumPy and torch (CPU) start from a seed of these keys. What they were
before is not put back: training draws its numbers from a seed of its own in each micro-batch (`engines.random_state`), and to
keep and restore all states took longer than a step of a small model.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from helixrt.job.permutation import seed_of


def seed_generators(*key: int) -> None:
    """Start the process's CPU generators from `key`."""
    seed = seed_of(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
