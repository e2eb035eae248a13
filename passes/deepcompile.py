"""A pass of DeepSpeed's DeepCompile: collectives of a compiled graph are launched early and waited for late.

In: a forward or backward graph as DeepCompile hands it to its passes, after the one that has put in ZeRO's own operators. Out:
the same graph in the order of `passes.hide`. DeepSpeed's operators (`torch.ops.dc`) take no process group and say little in
their schemas, so what they do is described in `passes.communication`: gathers of parameters are launched ahead, within `hide`'s
bound on memory, also past reductions of gradients, which keep their order among themselves; everything else of DeepSpeed's
stays where it is.

    from helixrt.passes import deepcompile
    deepcompile.register(engine)
    engine.compile(schedule=[(0, ["zero3_compile", deepcompile.NAME])])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from helixrt.errors import ConfigError
from helixrt.passes.hide import hide
from helixrt.passes.inductor_private import keep_order

NAME = "helixrt_hide"
ORDERED_ELSEWHERE = ("prefetch",)  # DeepSpeed's own pass for gathers: it fuses them, and plans their memory itself


def hide_collectives(
    gm: fx.GraphModule,
    graph_id: int,
    graph_order: Sequence[tuple[int, bool]],
    profiling_results: Any,
    create_inputs_fn: Callable[[], Sequence[Any]],
    mem_budget: float,
    param_manager: Any,
    bwd: bool,
) -> fx.GraphModule:
    """The pass, with DeepCompile's signature. `gm` gets the new order in place, with the same names of nodes, and is returned.
    Raises VerifyError as `hide` does."""
    gm.graph = hide(gm).graph
    return gm


def contract() -> Any:
    """A `PassContract`: it needs nothing of other passes, works on both graphs, and excludes `ORDERED_ELSEWHERE`. Raises
    ConfigError for a DeepSpeed without contracts of passes."""
    try:
        from deepspeed.compile.passes.contract import PassContract
    except ImportError as error:
        from importlib.metadata import version

        raise ConfigError("deepspeed", version("deepspeed"), "has no contracts of passes; install 0.19.8 or newer") from error
    return PassContract(conflicts_with=frozenset(ORDERED_ELSEWHERE), phase="both")


def register(engine: Any) -> None:
    """Register the pass with a DeepSpeed engine, under `NAME`, for the schedule that `engine.compile` is given. After
    `zero1_compile`, `zero2_compile` or `zero3_compile`; DeepCompile itself needs CUDA. Inductor's own pass that reorders for
    peak memory is switched off for the process, since it would undo the order."""
    keep_order()
    engine.register_compile_pass(NAME, hide_collectives, contract())
