"""A strand as the pairing search sees it: operators with a class, a time and what they depend on. No torch here.

Made from a part's graph by `classify` and `profile`; ordered, cut and paired by `sequence`, `segment` and `pair`;
turned back into a graph by `weave`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What an operator keeps busy."""

    COMPUTE = "compute"
    INTRA = "intra-node communication"
    INTER = "inter-node communication"
    WAIT = "wait"  # for the collective it takes in; no time of its own
    FREE = "free"  # views and the like


COMMUNICATION = frozenset({Kind.INTRA, Kind.INTER})


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of a strand's graph.

    `needs` are indices of operators in the same strand. For communication, `time_us` is from launch to completion
    when nothing else runs; `host_us` is the part of it for which the launching processor is busy (0 on a GPU).
    `movable` marks operators whose place the search may choose (weight gradients, routers). `signature` names the
    operator with its shapes and dtypes, as the profile knows it; `node` is the graph node's name.
    """

    node: str
    kind: Kind
    time_us: float
    needs: tuple[int, ...] = ()
    signature: str = ""
    host_us: float = 0.0
    movable: bool = False
    bytes: int = 0
    layer: int | None = None


@dataclass(frozen=True)
class Overlap:
    """How well operators hide behind each other: the overlap effectiveness factor of DHelix, equation (1).

    factor = (T_i + T_j - P_ij) / min(T_i, T_j): 1 hides the shorter one wholly, 0 not at all, below 0 both take longer.
    Measured pairs by signatures, else the default of the two kinds.
    """

    kinds: Mapping[frozenset[Kind], float]
    measured: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def factor(self, first: Operator, second: Operator) -> float:
        for key in ((first.signature, second.signature), (second.signature, first.signature)):
            if key in self.measured:
                return self.measured[key]
        return self.kinds.get(frozenset({first.kind, second.kind}), 0.0)
