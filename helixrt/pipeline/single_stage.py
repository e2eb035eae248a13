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

from helixrt.passes.executable import Gradients
from helixrt.passes.lift import Cast
from helixrt.passes.parts import Port, Role
from helixrt.pipeline.casts import Casts
from helixrt.pipeline.held import Strand, Values, lasting_of, parameters_of, run_held
from helixrt.pipeline.strands import Strands

Inputs = Mapping[Port, torch.Tensor]  # of one micro-batch: INPUT and TARGET by their ports, strand 0
InputGradient = Callable[[int, str, torch.Tensor], None]  # micro-batch, name of the input, gradient


class SingleStage:
    """Runs steps. `loss` is the loss if it is a module: its parameters are called `loss.NAME`. `casts` are those of parameters
    that the graphs take in; each step makes them."""

    def __init__(self, strands: Strands, module: nn.Module, loss: nn.Module | None = None, casts: Sequence[Cast] = ()) -> None:
        self.strands = strands
        self.lasting = lasting_of(module, loss)
        self.casts = Casts(self.lasting, casts)
        self.later = frozenset(strands.backward.inputs)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What gradients are of, by the name they are given out under."""
        return parameters_of(self.lasting)

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
        self.casts.forget()
        self.casts.refresh()
        graphs, count = self.strands, len(microbatches)
        held: list[Values] = []
        losses: list[torch.Tensor] = []

        def begin(index: int) -> Strand:
            held.append(dict(microbatches[index]))
            return Strand(held[index], self.later)

        def keep(index: int, results: Values) -> None:
            for port, value in results.items():
                losses.append(value.clone())  # as a view it would hold what it lies in
                held[index][Port(Role.TANGENT, port.name)] = torch.full_like(value, 1.0 / count)

        def hand_out(index: int, results: Values) -> None:
            held[index].clear()
            for port, value in results.items():
                if input_gradient is not None:
                    input_gradient(index, port.name, value)

        keep(0, run_held(graphs.forward, [begin(0)], self.lasting, gradients)[0])
        for index in range(1, count):
            before = Strand(held[index - 1])
            if graphs.woven is not None:
                ahead, behind = run_held(graphs.woven, [begin(index), before], self.lasting, gradients)
            else:
                (behind,) = run_held(graphs.backward, [before], self.lasting, gradients)
                (ahead,) = run_held(graphs.forward, [begin(index)], self.lasting, gradients)
            keep(index, ahead)
            hand_out(index - 1, behind)
        (behind,) = run_held(graphs.backward, [Strand(held[-1])], self.lasting, last or gradients)
        hand_out(count - 1, behind)
        return torch.stack(losses)
