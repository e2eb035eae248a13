"""Plans of strands for ranks that are not there: what would two strands gain on such links?

In: a module as the first rank holds it, built inside `fake_world`, example arguments of a micro-batch, and what the
links are said to do. Out: an `Explanation` as of a compiled model. Compute is measured on this device, communication is
estimated from the links' rate and latency, and pairs from experience: a plan to look at, not one to run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from helixrt.compile.explanation import Explanation, explained, with_times
from helixrt.compile.fake_world_private import fake_world
from helixrt.compile.options import Options
from helixrt.errors import ConfigError
from helixrt.passes import nodes
from helixrt.passes.capture import Loss, capture
from helixrt.passes.estimate import Supposed, Wire
from helixrt.passes.group_private import group_named
from helixrt.passes.groups import Group, group_name
from helixrt.passes.lift import lift
from helixrt.passes.pair import Rules
from helixrt.passes.parts import Part
from helixrt.passes.profile import Mode
from helixrt.pipeline.strands import build

__all__ = ["Links", "fake_world", "plan_ahead"]

MBIT = 0.125  # bytes per microsecond


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a rank's communication is said to be like, between hosts and inside one.

    The first `per_host` ranks are on the first host, the next ones on the second, and so on. Rates are of each rank, in
    each direction. `processor`: for which share of its communication's time the processor is busy with it (0 where
    devices do it by themselves; TCP on a processor's cores may take a third). Raises ConfigError.
    """

    mbit: float = 1000.0
    latency_us: float = 100.0
    inside_mbit: float = 10_000.0
    inside_latency_us: float = 20.0
    per_host: int = 1
    processor: float = 0.0

    def __post_init__(self) -> None:
        for key in ("mbit", "inside_mbit"):
            if not 0.0 < getattr(self, key) < float("inf"):
                raise ConfigError(f"links.{key}", getattr(self, key), "must be above 0")
        for key in ("latency_us", "inside_latency_us"):
            if not 0.0 <= getattr(self, key) < float("inf"):
                raise ConfigError(f"links.{key}", getattr(self, key), "must be 0 or more")
        if self.per_host < 1:
            raise ConfigError("links.per_host", self.per_host, "must be at least 1")
        if not 0.0 <= self.processor <= 1.0:
            raise ConfigError("links.processor", self.processor, "must be between 0 and 1")

    def supposed(self, ranks: Sequence[int]) -> Supposed:
        """A group of these ranks of the world."""
        hosts = [rank // self.per_host for rank in ranks]
        group = Group(tuple(sorted((hosts.count(host) for host in set(hosts)), reverse=True)))
        inside = len(group.ranks_per_host) == 1
        mbit, latency = (self.inside_mbit, self.inside_latency_us) if inside else (self.mbit, self.latency_us)
        return Supposed(group, Wire(latency, mbit * MBIT, self.processor))


def plan_ahead(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    target: Any = None,
    links: Links | None = None,
    codegen: str = "eager",
    mode: Mode | str = Mode.AUTO,
    rules: Rules | None = None,
) -> Explanation:
    """Both strands of the module, planned for `links`. Raises CaptureError as `capture` does."""
    began = time.perf_counter()
    joint = lift(capture(module, args, kwargs, loss=loss, target=target)).part
    supposed = {name: (links or Links()).supposed(ranks) for name, ranks in ranks_of(joint).items()}
    strands = build(joint, mode=mode, rules=rules, codegen=codegen, supposed=supposed)
    strands = with_times(strands, mode)
    options = Options(microbatches=2, codegen=codegen)
    return explained(strands, time.perf_counter() - began, options, supposed)


def ranks_of(part: Part) -> dict[str, list[int]]:
    """The ranks of each group that the part communicates in."""
    names = dict.fromkeys(group_name(node) for node in part.graph.nodes if nodes.communicates(node))
    return {name: dist.get_process_group_ranks(group_named(name)) for name in names}
