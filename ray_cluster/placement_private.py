"""What placement needs of Ray's private interface (2.59 and 2.60): free resources by node, and a node that is preferred.

`placement_group(_soft_target_node_id=...)` works with STRICT_PACK alone: the group is made on that node, on another one if that
is full or gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from helixrt.private_api import RAY_RESOURCES, usable


def resources() -> tuple[dict[str, Mapping[str, float]], dict[str, Mapping[str, float]]]:
    """Of the living nodes, by their ids: all resources, and those that are free now. Nothing where Ray does not tell it."""
    if not usable(RAY_RESOURCES):
        return {}, {}
    from ray._private import state

    return state.total_resources_per_node(), state.available_resources_per_node()


def group_on(node: str, bundles: Sequence[Mapping[str, float]], name: str) -> Any:
    """A placement group on one node, which should be this one."""
    from ray.util.placement_group import placement_group

    return placement_group([dict(b) for b in bundles], strategy="STRICT_PACK", name=name, _soft_target_node_id=node)
