"""The one part of DTensor (torch 2.13 to 2.15) that is used here and is not public: placements of strided shards.

A strided shard of dimension `dim` over n ranks with `factor` f: the dimension is cut into f equal parts, each part into n, and
a rank holds its piece of every part. FSDP2 makes them of dimensions that tensor parallelism has cut already (f: over how many
ranks); weights that pack f matrices into one dimension are cut so over tp ranks.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import placement_types
from torch.distributed.tensor.placement_types import Placement

from helixrt.private_api import STRIDED_SHARDS, require


def strided_shard(dim: int, factor: int) -> Placement:
    """Raises ConfigError where this torch has no such placements."""
    require(STRIDED_SHARDS)
    made: Placement = placement_types._StridedShard(dim, split_factor=factor)
    return made


def factor_of(placement: Any) -> int | None:
    """Of a strided shard; None for any other placement. Raises ConfigError for strided shards that have none."""
    strided = getattr(placement_types, "_StridedShard", None)
    if strided is None or not isinstance(placement, strided):
        return None
    require(STRIDED_SHARDS)
    return int(placement.split_factor)
