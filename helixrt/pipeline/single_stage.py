"""Trains a model that is one stage: F of the first micro-batch, then B of each woven with F of the next, then the last B.

In: the stage's graphs (`strands.Strands`), the module whose parameters and buffers they read in place, the
micro-batches' inputs. Out: the micro-batches' losses; gradients of their mean, handed out as they are made; buffers
that changed. DHelix, section 4.1, on a single stage; without a woven graph, F and whole backward in turn.

Forwards run one after the other, so that random operators draw from the default generator what a plain loop's forwards
draw; buffers see the micro-batches in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from helixrt.passes.executable import Executable, Gradients
from helixrt.passes.parts import Port, Role, local
from helixrt.passes.timing import BACKWARD, FORWARD
from helixrt.pipeline.strands import Strands

Inputs = Mapping[Port, torch.Tensor]  # of one micro-batch: INPUT and TARGET by their ports, strand 0
InputGradient = Callable[[int, str, torch.Tensor], None]  # micro-batch, name of the input, gradient


class SingleStage:
    """Runs steps. `loss` is the loss if it is a module: its parameters are called `loss.NAME`."""

    def __init__(self, strands: Strands, module: nn.Module, loss: nn.Module | None = None) -> None:
        self.strands = strands
        self.lasting: dict[Port, torch.Tensor] = {}
        for prefix, owner in (("", module), ("loss.", loss)):
            if owner is not None:
                for name, parameter in owner.named_parameters(remove_duplicate=False):
                    self.lasting[Port(Role.PARAMETER, prefix + name)] = parameter
                for name, buffer in owner.named_buffers(remove_duplicate=False):
                    self.lasting[Port(Role.BUFFER, prefix + name)] = buffer

    def parameters(self) -> dict[str, nn.Parameter]:
        """What gradients are of, by the name they are given out under."""
        return {port.name: value for port, value in self.lasting.items() if isinstance(value, nn.Parameter)}

    def run(
        self,
        microbatches: Sequence[Inputs],
        gradients: Gradients,
        *,
        last: Gradients | None = None,
        input_gradient: InputGradient | None = None,
    ) -> torch.Tensor:
        """One step; returns the losses [micro-batches].

        Gradients are those of loss i divided by the number of micro-batches, one after the other; the last
        micro-batch's go to `last` if it is given. Inputs that require grad have theirs given to `input_gradient`.
        """
        step = _Step(self.lasting, microbatches, input_gradient)
        graphs = self.strands
        step.run(graphs.forward, forward=0, gradients=gradients)
        for index in range(1, len(microbatches)):
            if graphs.woven is not None:
                step.run(graphs.woven, forward=index, backward=index - 1, gradients=gradients)
            else:
                step.run(graphs.backward, backward=index - 1, gradients=gradients)
                step.run(graphs.forward, forward=index, gradients=gradients)
        step.run(graphs.backward, backward=len(microbatches) - 1, gradients=last or gradients)
        return torch.stack(step.losses)


class _Step:
    """What is alive during one step: what the forwards saved for the backwards, and the losses."""

    def __init__(
        self, lasting: Mapping[Port, torch.Tensor], inputs: Sequence[Inputs], input_gradient: InputGradient | None
    ) -> None:
        self.lasting, self.inputs, self.input_gradient = lasting, inputs, input_gradient
        self.saved: list[dict[str, torch.Tensor]] = [{} for _ in inputs]
        self.losses: list[torch.Tensor] = []

    def run(self, graph: Executable, *, gradients: Gradients, forward: int = -1, backward: int = -1) -> None:
        """Run a graph of one strand or both, for the micro-batches given. A part alone has strand 0 in all its ports."""
        at = {FORWARD: backward if forward < 0 else forward, BACKWARD: backward}

        def take(port: Port) -> torch.Tensor:
            microbatch = at[port.strand]
            if port.role in (Role.PARAMETER, Role.BUFFER):
                return local(self.lasting[Port(port.role, port.name)])
            if port.role is Role.SAVED:
                return self.saved[microbatch].pop(port.name)
            if port.role is Role.TANGENT:
                return torch.full_like(self.losses[microbatch], 1.0 / len(self.inputs))
            return local(self.inputs[microbatch][Port(port.role, port.name)])

        for port, value in graph(take, gradients):
            microbatch = at[port.strand]
            if port.role is Role.SAVED:
                self.saved[microbatch][port.name] = value
            elif port.role is Role.OUTPUT:
                self.losses.append(value.clone())  # as a view it would hold what it lies in
            elif port.role is Role.BUFFER:
                with torch.no_grad():
                    local(self.lasting[Port(Role.BUFFER, port.name)]).copy_(value)
            elif port.role is Role.INPUT_GRADIENT and self.input_gradient is not None:
                self.input_gradient(microbatch, port.name, value)
