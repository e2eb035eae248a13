"""The one file that makes process groups without other ranks; torch has them for its own tests.

In: how many ranks there are to be. Out: a default process group of that size in this process, as its first rank, whose
collectives do not communicate: graphs can be captured in it, and groups and device meshes made, but results of
collectives mean nothing. The same in torch 2.13 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from helixrt.errors import ConfigError
from helixrt.private_api import FAKE_WORLD, require


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """`ranks` ranks, until the end of the block. Raises ConfigError where there is a process group already, or where this
    torch has no such groups."""
    require(FAKE_WORLD)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("ranks", ranks, "cannot be supposed where a process group is ready; leave it first")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
