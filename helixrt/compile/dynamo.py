"""`torch.compile(model, backend="helixrt")`: forward and backward graphs with their communication hidden.

In: what Dynamo captured, whole models or pieces between graph breaks. Out: functions for the forward and the backward,
by torch's ahead-of-time autograd, whose collectives are launched early and waited for late inside the one micro-batch
(`passes.hide`); tensors are freed at their last use. Operators and their arguments are what eager runs, so numbers are
too. Two micro-batches are woven only by `helixrt.compile`, which sees the whole step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from helixrt.passes import nodes
from helixrt.passes.executable import emptying
from helixrt.passes.hide import hide
from helixrt.passes.higher_order import check_higher_order
from helixrt.private_api import DYNAMO_BACKEND, require

RECORDED = 64


@dataclass(frozen=True)
class Graph:
    """A graph that was compiled: `kind` is "forward", "backward" or "inference"; `code` is readable Python."""

    kind: str
    operators: int
    collectives: int
    code: str


recorded: deque[Graph] = deque(maxlen=RECORDED)  # the latest graphs, oldest first


def backend(module: fx.GraphModule, inputs: Sequence[Any], **options: object) -> Callable[..., Any]:
    """The function torch.compile looks up by the name "helixrt"; takes no options. Raises ConfigError where this torch has no
    ahead-of-time autograd for backends."""
    require(DYNAMO_BACKEND)
    from torch._dynamo.backends.common import aot_autograd

    if options:
        raise TypeError(f'backend="helixrt" takes no options, got {", ".join(options)}')
    compiled = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference")
    )
    return compiled(module, inputs)


def compiler(kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]:
    """What makes a boxed function of a graph."""

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        check_higher_order(module, f"the {kind} graph")
        ordered = hide(module)
        listed = [node for node in ordered.graph.nodes if node.op not in ("placeholder", "output")]
        recorded.append(
            Graph(kind, len(listed), sum(map(nodes.is_collective, listed)), ordered.print_readable(print_output=False))
        )
        run = emptying(ordered, ordered.graph.output_node().args[0], {})

        def call(arguments: list[Any]) -> Any:
            arguments.reverse()  # `run` takes them from the end, and leaves the list empty
            return run.forward(arguments, None)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return compile_graph


__all__ = ["Graph", "backend", "recorded"]
