"""Gradients of graphs are added to `p.grad` as autograd adds them.

In: a module's parameters by name, gradients as the graphs make them, one per parameter and backward. Out: `p.grad`:
taken over where there is none, added to in place where there is one, so that accumulation over micro-batches and calls
has the sums of a plain loop in the same order. (A tied parameter's two gradients are summed in the graph, as autograd
sums them before it accumulates.)

A parameter with hooks goes through autograd itself, with every micro-batch, as in a plain loop: gradient hooks see and
may change each gradient, post-accumulate hooks run after each, and so do hooks on the node that accumulates the gradient
(DistributedDataParallel and Megatron put theirs there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from helixrt.passes.parts import Layout
from helixrt.passes.pieces import Piece
from helixrt.pipeline.buckets import GradientBuckets


class ParameterGradients:
    """`passes.executable.Gradients` of a module's parameters; `layouts` as in the part."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, Layout]) -> None:
        self.parameters, self.layouts = parameters, layouts
        self._held: dict[str, bool] = {}

    def give(self, name: str, gradient: torch.Tensor) -> None:
        """Add one gradient (of the parameter's shape and dtype; for a DTensor, of its local tensor's)."""
        parameter, value = self.parameters[name], self.wrapped(name, gradient)
        if hooked(parameter) or self.held(name) or is_sparse(value) or is_sparse(parameter.grad):
            self.through_autograd(name, gradient)
        elif parameter.grad is not None:
            parameter.grad.add_(value)
        elif name in self.layouts or value.stride() == parameter.stride():
            parameter.grad = value
        else:  # autograd, too, lays a new gradient out as its parameter is
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(value)

    def through_autograd(self, name: str, gradient: torch.Tensor) -> None:
        """As `give`, setting off all that hangs on the parameter's accumulation."""
        with torch.enable_grad():
            torch.autograd.backward((self.parameters[name],), (self.wrapped(name, gradient),))

    def held(self, name: str) -> bool:
        """As `accumulator_held`, of one parameter; looked up once."""
        if name not in self._held:
            self._held[name] = accumulator_held(self.parameters[name])
        return self._held[name]

    def wrapped(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return self.layouts[name].wrap(gradient) if name in self.layouts else gradient


class BucketGradients(ParameterGradients):
    """Gradients go straight into buckets, which are all that hangs on most parameters; where more does, through autograd.

    `pieces`: of parameters of which this rank has a part, where their gradients come whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, Layout],
        buckets: GradientBuckets,
        pieces: Mapping[str, Piece],
    ) -> None:
        super().__init__(parameters, layouts)
        self.buckets, self.pieces = buckets, pieces

    def give(self, name: str, gradient: torch.Tensor) -> None:
        parameter = self.parameters[name]
        if name in self.pieces:
            gradient = self.pieces[name].of(gradient)
        if name in self.layouts or is_sparse(gradient) or hooks(parameter) > 1 or self.held(name):
            self.through_autograd(name, gradient)
        else:
            self.buckets.add(parameter, gradient)


def is_sparse(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.layout is not torch.strided


def hooked(parameter: nn.Parameter) -> bool:
    """Has hooks on its gradient."""
    return hooks(parameter) > 0


def hooks(parameter: nn.Parameter) -> int:
    """How many hooks. The two attributes are where torch's public `register_…` methods put them."""
    return len(parameter._backward_hooks or ()) + len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


MARK = "helixrt.passes"  # in the metadata of accumulators that were looked at


def accumulator_held(parameter: torch.Tensor) -> bool:
    """Whether something holds the node that accumulates the parameter's gradient, and so may have hooks on it.

    Autograd itself holds it weakly and makes a new one when it is gone, so hooks last only as long as their owner holds
    the node. Python cannot list these hooks (DistributedDataParallel's are C++). A mark in the node's metadata shows
    whether the node is the same at a second look.
    """
    metadata: Any = get_gradient_edge(parameter).node.metadata  # a dictionary; torch's annotation is wrong
    if MARK in metadata:
        return True
    metadata[MARK] = True
    del metadata
    metadata = get_gradient_edge(parameter).node.metadata
    return MARK in metadata
