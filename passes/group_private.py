"""The one file that looks process groups up by the name a captured graph has for them; torch has no public way."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

from helixrt.private_api import NAMED_GROUPS, require


def group_named(name: str) -> Any:
    """The process group of this process that is registered under `name`. Raises RuntimeError if there is none, and ConfigError
    where torch has no such look-up."""
    require(NAMED_GROUPS)
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
