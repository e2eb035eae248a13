"""What cutting a captured model gives: chunks, what crosses between them, what they share.

Types alone; `cut` makes them and its docstring has the contract of the chunks' graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from helixrt.passes.parts import Part, Port

if TYPE_CHECKING:
    from helixrt.passes.guards_private import Guards

BOUNDARY = "0"  # of INPUT and INPUT_GRADIENT
OUTPUT = "output"  # of OUTPUT and TANGENT in all chunks but the last
MODEL_0 = "model.0"  # what later chunks call the model's own input `0`


@dataclass(frozen=True)
class Boundary:
    """The tensor that crosses between two neighbouring chunks, as INPUT `0` and, backwards, as INPUT_GRADIENT `0`.

    `shape` and `dtype` are the same both ways; it is contiguous. It is the hidden state, as it is, unless the end of the
    model also uses values of earlier layers (router logits for an auxiliary loss): then it is flat, with all of `values`
    one after the other. `values` and `gradients` name the nodes of the whole graph that it carries.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: tuple[str, ...]
    gradients: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ModelInput:
    """A tensor of the micro-batch that a chunk takes in: by which port, and which INPUT or TARGET of the model it is."""

    port: Port
    source: Port


@dataclass(frozen=True)
class ModelChunk:
    """One chunk. `part` is its joint graph; all names are those of the whole model.

    `first` is the module that it begins with ("" for the first chunk), `layers` the numbers of its layers. `parameters` and
    `buffers` are what the graphs take in, in the order of the ports; `gradients` the parameters that it gives a gradient
    of, `changed` the buffers that it gives new values of: for the caller to copy in after each forward. `seeded` tells
    whether `SEED` is among the inputs. `before` and `after` are the boundaries on both sides, None at the ends.
    """

    number: int
    part: Part
    first: str
    layers: tuple[int, ...]
    inputs: tuple[ModelInput, ...]
    parameters: tuple[str, ...]
    gradients: tuple[str, ...]
    buffers: tuple[str, ...]
    changed: tuple[str, ...]
    seeded: bool
    before: Boundary | None
    after: Boundary | None


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several `chunks` use. Each has it as a PARAMETER; those that give a gradient of it give a term of its
    gradient, to be added once per step."""

    name: str
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class CutModel:
    """A model cut into chunks; `boundaries[i]` is between chunks i and i + 1.

    `lines` describe ports, boundaries and operators of all chunks; ranks compare them (`agree.agree_on`), since ports are
    named by nodes. `hash` is their SHA-256. `guards`: which Python values the model was captured with.
    """

    chunks: tuple[ModelChunk, ...]
    boundaries: tuple[Boundary, ...]
    ties: tuple[Tie, ...]
    lines: tuple[str, ...]
    hash: bytes
    guards: Guards | None = field(default=None, compare=False, repr=False)
