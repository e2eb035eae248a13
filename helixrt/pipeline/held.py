"""Runs graphs on what micro-batches hold between them.

In: a graph of one strand or of two (`Executable`), what the micro-batch of each strand holds, and what lasts: parameters,
their casts (`casts`) and buffers, which graphs read in place. Out: the results that leave; what later graphs need stays with
the micro-batch, each value until the last graph that takes it in has it. So an activation is freed inside the graph that
uses it last, and what a weight-gradient graph needs stays until that has run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from helixrt.passes.executable import Executable, Gradients
from helixrt.passes.parts import Port, Role, local

Values = dict[Port, torch.Tensor]  # by ports of strand 0


@dataclass(frozen=True)
class Strand:
    """One side of a run: what its micro-batch holds, and the ports that graphs still to come take in as well."""

    held: Values
    later: Collection[Port] = ()


def run_held(
    graph: Executable, strands: Sequence[Strand], lasting: Mapping[Port, torch.Tensor], gradients: Gradients
) -> list[Values]:
    """Run a graph; returns for each strand its OUTPUT and INPUT_GRADIENT values.

    `strands` are one, or as many as the graph has; they lose what is taken in for the last time, and gain what the
    graph saves. Buffers that changed are written to `lasting`.
    """

    def take(port: Port) -> torch.Tensor:
        own = Port(port.role, port.name)
        if port.role in (Role.PARAMETER, Role.CAST, Role.BUFFER):
            return local(lasting[own])
        strand = strands[port.strand]
        return local(strand.held[own] if own in strand.later else strand.held.pop(own))

    results: list[Values] = [{} for _ in strands]
    for port, value in graph(take, gradients):
        own = Port(port.role, port.name)
        if port.role is Role.SAVED:
            strands[port.strand].held[own] = value
        elif port.role is Role.BUFFER:
            with torch.no_grad():
                local(lasting[own]).copy_(value)
        else:
            results[port.strand][own] = value
    return results


def lasting_of(module: nn.Module, loss: object = None, prefix: str = "") -> Values:
    """Parameters and buffers of a module by port, under all their names, each with `prefix`.

    Those of a loss that is a module are called `loss.NAME`.
    """
    found: Values = {}
    for name, owner in (("", module), ("loss.", loss)):
        if isinstance(owner, nn.Module):
            for role, tensors in (
                (Role.PARAMETER, owner.named_parameters(remove_duplicate=False)),
                (Role.BUFFER, owner.named_buffers(remove_duplicate=False)),
            ):
                found |= {Port(role, prefix + name + key): tensor for key, tensor in tensors}
    return found


def parameters_of(lasting: Mapping[Port, torch.Tensor]) -> dict[str, nn.Parameter]:
    """The parameters among them, by the name that their gradients are given out under."""
    return {port.name: value for port, value in lasting.items() if isinstance(value, nn.Parameter)}
