"""What passes hand to each other: a graph whose every input and output has a name and a meaning.

A `Part` is a torch.fx graph module together with the `Port` of each placeholder and of each output, in order, and
the stamps of the passes it went through. The parts of a captured model are the joint graph, then F, B and W after
the split, then woven graphs, whose ports say which strand they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from helixrt.passes.guards_private import Guards


class Role(StrEnum):
    """What an input or output of a part is. `name` in `Port` identifies it."""

    PARAMETER = "parameter"  # in: a parameter by its qualified name
    CAST = "cast"  # in: a parameter in another type, as `NAME as TYPE`; made by the caller, see `lift`
    BUFFER = "buffer"  # in: a buffer; out: its new value
    INPUT = "input"  # in: a tensor of the micro-batch, by its position or keyword
    TARGET = "target"  # in: what the loss compares with
    TANGENT = "tangent"  # in: gradient of the output of the same name (1 / micro-batches for a loss)
    SAVED = "saved"  # out of F, in to B or W; out of B, in to W: by the producing node's name
    OUTPUT = "output"  # out of F: the chunk's output, or the loss in the last chunk
    INPUT_GRADIENT = "input gradient"  # out of B: gradient of the input of the same name
    GRADIENT = "gradient"  # out of B or W: gradient of the parameter of the same name


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a part; `strand` 0 or 1 in woven parts, 0 elsewhere."""

    role: Role
    name: str
    strand: int = 0


@dataclass(frozen=True, slots=True)
class Stamp:
    """A pass that has been over a part, and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Layout:
    """The placement of a DTensor on its mesh; a part's ports carry only the local tensors."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor whose local tensor is `local`."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What a port carries for a tensor: of a DTensor its local tensor, else the tensor itself."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    found = getattr(tensor, "_local_tensor", None)
    return tensor if found is None else found


@dataclass(frozen=True)
class Part:
    """A graph with named boundaries. `inputs[i]` is the i-th placeholder, `outputs[i]` the i-th output.

    `layouts` tells, by the parameter's name, how the gradient of a DTensor parameter is laid out (it may be a partial
    sum where the parameter is whole, as in eager). Outputs named GRADIENT are never views of something else, so the
    caller may keep them and add to them in place; other outputs may share memory with inputs and with one another.
    `guards`: of a captured joint graph, which Python values it was captured with.
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    stamps: tuple[Stamp, ...] = ()
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    guards: Guards | None = field(default=None, compare=False, repr=False)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def stamped(self, name: str, seconds: float) -> Part:
        return replace(self, stamps=(*self.stamps, Stamp(name, seconds)))

    def run(self, values: Mapping[Port, torch.Tensor]) -> dict[Port, torch.Tensor]:
        """The outputs, from `values` of at least the inputs; without autograd. For tests and tools: keeps all alive."""
        with torch.no_grad():
            return dict(zip(self.outputs, self.module(*(values[port] for port in self.inputs)), strict=True))

    def code(self) -> str:
        """The graph as readable Python: each result with dtype and shape, and the user's line it comes from."""
        return self.module.print_readable(print_output=False)


@dataclass(frozen=True)
class Split:
    """F, B and W of one chunk, by dependency. Running F, then B, then W equals the joint graph.

    What passes between them is SAVED: `forward_to_weight`, which B may take as well, and `backward_to_weight`.
    """

    forward: Part
    backward: Part
    weight: Part
    forward_to_weight: tuple[Port, ...]
    backward_to_weight: tuple[Port, ...]

    @staticmethod
    def of(forward: Part, backward: Part, weight: Part) -> Split:
        saved = [port for port in weight.inputs if port.role is Role.SAVED]
        by_forward, by_backward = (tuple(port for port in saved if port in part.outputs) for part in (forward, backward))
        return Split(forward, backward, weight, by_forward, by_backward)
