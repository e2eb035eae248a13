"""Where the ranks of a replica run: one placement group per replica and incarnation, replicas spread over the nodes.

In: what a rank reserves, how many ranks a replica has, what each node has and what of it is free. Out: the placement group of
an incarnation, one bundle per rank. A replica stays on one node where one has room for it, since its ranks talk most to each
other; of such nodes the one with the fewest replicas is taken, so that the loss of a node costs as few replicas as possible. A
replica that no node can hold is packed on few.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from helixrt.ray_cluster.placement_private import group_on, resources

SETTLE_S = 15.0  # how long a replica waits for room on one node, while others free what they had

Life = tuple[int, int]  # replica, incarnation


@dataclass(frozen=True)
class NodeRoom:
    """A living node: what it has, what of that is free, and how many replicas of this run it holds."""

    node: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    replicas: int = 0


@dataclass(frozen=True)
class Together:
    """All ranks on this node."""

    node: str


@dataclass(frozen=True)
class Apart:
    """On as few nodes as have room."""


@dataclass(frozen=True)
class Later:
    """A node could hold the replica, and is in use now."""


def choose(nodes: Iterable[NodeRoom], rank: Mapping[str, float], ranks: int, waited_s: float) -> Together | Apart | Later:
    """Where a replica of so many ranks is started, each of which reserves `rank`; `waited_s` since it was to be started."""
    need = {name: ranks * amount for name, amount in rank.items() if amount}
    nodes = list(nodes)
    roomy = [node for node in nodes if _holds(node.free, need)]
    if roomy:
        return Together(min(roomy, key=lambda node: (node.replicas, node.node)).node)
    if waited_s < SETTLE_S and any(_holds(node.total, need) for node in nodes):
        return Later()
    return Apart()


def _holds(have: Mapping[str, float], need: Mapping[str, float]) -> bool:
    return all(have.get(name, 0.0) >= amount - 1e-6 for name, amount in need.items())


class Placements:
    """The placement groups of a run. Needs a process that is connected to Ray; calls come from one thread."""

    def __init__(self, run: str, rank: Mapping[str, float], ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        import ray

        self._ray, self._run, self._rank, self._ranks, self._clock = ray, run, dict(rank), ranks, clock
        self._groups: dict[Life, Any] = {}
        self._since: dict[Life, float] = {}
        self._nodes: dict[Life, str] = {}  # chosen, for those on one node

    def place(self, life: Life) -> Any | None:
        """The placement group of this incarnation, made once; None while it waits for a node with room."""
        if life in self._groups:
            return self._groups[life]
        since_s = self._since.setdefault(life, self._clock())
        choice = choose(self._rooms(), self._rank, self._ranks, self._clock() - since_s)
        if isinstance(choice, Later):
            return None
        bundles = [self._rank] * self._ranks
        name = f"{self._run}/r{life[0]}.inc{life[1]}"
        if isinstance(choice, Together):
            self._nodes[life] = choice.node
            self._groups[life] = group_on(choice.node, bundles, name)
        else:
            self._groups[life] = self._ray.util.placement_group(bundles, strategy="PACK", name=name)
        return self._groups[life]

    def remove(self, life: Life) -> None:
        """Give back what the incarnation reserved; its actors end with that. Idempotent."""
        group = self._groups.pop(life, None)
        self._since.pop(life, None)
        self._nodes.pop(life, None)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def _rooms(self) -> list[NodeRoom]:
        total, free = resources()
        held = Counter(self._nodes.values())
        return [NodeRoom(node, total[node], free.get(node, {}), held[node]) for node in sorted(total)]
