"""What computes on a stage: the contract, and the way by autograd.

In: operations of a schedule with what comes in for them: tokens or hidden states for F, the gradient of the output for
a backward. Out: what each makes for the neighbouring chunk. Parameter gradients add up in `p.grad`, in the buckets.
Graphs of the chunks do the same in `graph_stage`, and more: W apart from B, pairs woven.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from helixrt.errors import MisuseError
from helixrt.passes.autocast import without_autocast
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.schedule.ir import Op

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """An operation and what it is given.

    `given` is the chunk's input for F; for B and BW the gradient of its output, or a factor of the loss (a scalar, of
    its dtype) in the last chunk; None for W. `target` is what the loss compares with, in the last chunk's F.
    """

    op: Op
    chunk: int
    microbatch: int
    given: torch.Tensor | None
    target: torch.Tensor | None = None


class Stage(ABC):
    """Computes the operations of one stage's chunks. Calls come from one thread, in the order of a schedule."""

    has_shapes: ClassVar[bool] = False
    """What it computes was made for the boundary between chunks: another shape or type would be computed wrongly."""

    @abstractmethod
    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        """Run an entry of a schedule: one task, or a forward and a backward that overlap. The result of each.

        May empty `tasks`, so that no other reference to the tensors remains.

        Of F the chunk's output, or the micro-batch's loss (a scalar) in the last chunk; of B and BW the gradient of
        the input (None for tokens); of W None. `buckets` hold the parameters' gradients. Without, nothing is kept for
        a backward; grad mode is on with them, off without.
        """

    @abstractmethod
    def reset(self) -> None:
        """Drop micro-batches without a backward (of a step that broke)."""


class StageChunk:
    """One chunk by autograd. `loss(output, target)`, a mean, is given to the last chunk only; the `first` one computes no
    gradient of its input. `around(node)` is entered around each backward, which begins at this node of the graph.

    Between F and B of a micro-batch it keeps the input and the graph, not the output itself.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None = None,
        first: bool = False,
        around: Callable[[Any], AbstractContextManager[None]] = lambda node: nullcontext(),
    ) -> None:
        self.module, self.loss, self.first, self._around = module, loss, first, around
        self._stash: dict[int, tuple[torch.Tensor, GradientEdge | None]] = {}

    def reset(self) -> None:
        """As `Stage.reset`."""
        self._stash.clear()

    def forward(self, microbatch: int, x: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        """The chunk's output without its graph, or the micro-batch's loss (a scalar) in the last chunk.

        The graph is kept for `backward` if grad mode is on. Raises MisuseError for an output that is no tensor, and for a loss
        that is no scalar.
        """
        keep = torch.is_grad_enabled()
        if keep and not self.first and x.is_floating_point():
            x.requires_grad_()
        y = self.module(x)
        if self.loss is not None:
            assert target is not None
            y = self.loss(y, target)
        self._check(y)
        if keep:
            self._stash[microbatch] = (x, get_gradient_edge(y) if y.requires_grad else None)
        return y.detach()

    def _check(self, y: object) -> None:
        what = f"a part ({type(self.module).__name__})" if self.loss is None else "the loss of the stages"
        if not isinstance(y, torch.Tensor):
            raise MisuseError(f"{what} gives a {type(y).__name__}; it must give one tensor")
        if self.loss is not None and y.dim() > 0:
            rule = "it must give a scalar, the mean over a micro-batch"
            raise MisuseError(f"{what} gives a tensor of shape {list(y.shape)}; {rule}")

    def backward(self, microbatch: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Gradient of the input (None for tokens), given that of the output or a scale for the loss. It computes in the types
        of the forward, without autocast. Nothing, where all of the chunk and of those before it is frozen."""
        x, edge = self._stash.pop(microbatch)
        if edge is not None:
            with self._around(edge.node), without_autocast():
                torch.autograd.backward((edge,), (grad,))
        return x.grad


class AutogradStage(Stage):
    """Runs F and BW, one at a time (`program.whole_backwards` makes such schedules)."""

    def __init__(self, chunks: Mapping[int, StageChunk]) -> None:
        self.chunks = chunks

    def reset(self) -> None:
        for chunk in self.chunks.values():
            chunk.reset()

    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        (task,) = tasks  # gradients come to the buckets through their hooks
        assert task.given is not None, f"autograd does not run {task.op} by itself"
        chunk = self.chunks[task.chunk]
        if task.op is Op.F:
            return [chunk.forward(task.microbatch, task.given, task.target)]
        assert task.op is Op.BW, "autograd runs backwards in one piece"
        return [chunk.backward(task.microbatch, task.given)]
