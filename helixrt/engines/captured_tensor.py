"""A captured model over tp ranks: a tensor-parallel plan cuts it before the capture, and each rank holds its parts.

In: a model, on the meta device or real; the replica's mesh; a plan (`tensor_plan`). Out: `TensorCut`: a copy of the model
without values that the plan has cut, for the capture, and which part of each tensor this rank has. After the capture,
`gradient_forms`: which gradients the tp ranks sum, and which come whole where the rank has a part.

Parameters of a stage are plain tensors, this rank's parts. So buckets, sums and updates are those of any stage, whose
`ParameterLayout`s declare the placements.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from helixrt.compile.materialize import places
from helixrt.engines.dtensor_private import factor_of
from helixrt.engines.portions import Cut
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.sharded import check_kinds, is_sharded
from helixrt.engines.stage_ranks import DATA_AXES, WHOLE, ParameterLayout
from helixrt.engines.tensor_plan import TensorPlan, apply_plan
from helixrt.errors import MisuseError
from helixrt.passes.agree import broadcast
from helixrt.passes.cut_model import CutModel
from helixrt.passes.parts import Port, Role
from helixrt.passes.pieces import Piece, piece_of
from helixrt.replica.portions import parts_of

_TERM = ParameterLayout(summed=(*DATA_AXES, "tp"))
_OF_MATRICES = ("Muon",)  # optimizers whose update of an element needs the whole matrix


@dataclass(frozen=True)
class TensorCut:
    """`model` has the plan's DTensors over the tp ranks, on meta. `pieces`: of tensors that are cut, this rank's part. `terms`:
    parameters that every rank holds whole and of whose gradient each rank computes one term, by the plan. Both by the first
    names of parameters and buffers."""

    model: nn.Module
    pieces: Mapping[str, Piece]
    terms: frozenset[str]

    def has_part(self, port: Port) -> bool:
        """Whether this port is a parameter or buffer of which this rank has a part."""
        return port.role in (Role.PARAMETER, Role.BUFFER) and port.name in self.pieces


@dataclass(frozen=True)
class GradientForms:
    """`layouts` of parameters, by name, those left out are whole everywhere. `pieces` of parameters that are cut, where the
    captured gradient is whole."""

    layouts: Mapping[str, ParameterLayout] = field(default_factory=dict)
    pieces: Mapping[str, Piece] = field(default_factory=dict)

    def of(self, module: nn.Module) -> Mapping[str, ParameterLayout]:
        """Of the module's parameters."""
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        return {name: self.layouts[name] for name in names if name in self.layouts}


def cut_over_tp(model: nn.Module, mesh: ReplicaMesh, plan: TensorPlan | None) -> TensorCut:
    """`plan`: else the model's own one. The model is left as it is; all tp ranks call this.

    Raises as `apply_plan` does, and MisuseError for a model that cannot be copied, or that is cut already.
    """
    if cut := next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None):
        raise MisuseError(f"{cut} is a DTensor; give session.parallelize the plain model, and how it is cut as tp_plan={{...}}")
    twin = without_values(model)
    terms = apply_plan(twin, mesh.inner("tp").mesh, plan, without_values=True)
    of_terms = {id(module._parameters[key]) for module, key in terms}
    found: dict[int, str] = {}
    pieces: dict[str, Piece] = {}
    for name, place in places(twin).items():
        tensor = place.tensor
        if found.setdefault(id(tensor), name) == name and (piece := _piece(tensor, mesh)) is not None:
            pieces[name] = piece
    return TensorCut(twin, pieces, frozenset(found[identity] for identity in of_terms if identity in found))


def without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device; ties between tensors are kept. Raises MisuseError for a model that cannot be copied."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise MisuseError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}); with Mesh(tp=...) or Mesh(cp=...) "
            "a copy of it without values is changed and captured: let copy.deepcopy(model) work"
        ) from error


def _piece(tensor: Any, mesh: ReplicaMesh) -> Piece | None:
    """This rank's part of a DTensor over the tp ranks; None where it has all of it."""
    placement = tensor.placements[0] if is_sharded(tensor) else None
    if placement is None or placement.is_replicate():
        return None
    size, dim = tensor.shape, placement.dim % tensor.dim()
    return piece_of(dim, size[dim], mesh.rank("tp"), mesh.size("tp"), factor_of(placement) or 1)


def gradient_forms(cut: CutModel, over: TensorCut) -> GradientForms:
    """Of all parameters. Raises MisuseError for gradients that would have to be exchanged in each micro-batch."""
    own = {name: place.tensor for name, place in places(over.model).items()}
    layouts = dict.fromkeys(over.terms, _TERM) | {name: _part_of(own[name]) for name in over.pieces}
    pieces: dict[str, Piece] = {}
    for chunk in cut.chunks:
        for name, layout in chunk.part.layouts.items():
            whole, gradient = name not in over.pieces, layout.placements[0]
            wanted: Any = own[name].placements[0] if is_sharded(own[name]) else "none"  # type: ignore[attr-defined]
            if whole and gradient.is_partial("sum"):
                layouts[name] = _TERM
            elif not whole and gradient.is_replicate():
                pieces[name] = over.pieces[name]
            elif gradient != wanted and not (whole and gradient.is_replicate()):
                raise MisuseError(
                    f"the gradient of {name} has the placement {gradient} over the tp ranks, and the parameter has {wanted}; "
                    "give its module another style in tp_plan, so that a rank's gradient is that of its own part"
                )
    return GradientForms(_under_all_names(layouts, over.model), pieces)


def _part_of(tensor: Any) -> ParameterLayout:
    """Of a DTensor that is cut over the tp ranks."""
    placement = tensor.placements[0]
    dim = placement.dim % tensor.dim()
    sections = parts_of(tensor.shape[dim], factor_of(placement) or 1)
    return ParameterLayout(sharded=("tp",), cuts=(Cut(dim, ("tp",), sections),))


def _under_all_names(layouts: Mapping[str, ParameterLayout], model: nn.Module) -> dict[str, ParameterLayout]:
    """Also of tied parameters, which have several; none for those that are whole."""
    by_tensor: dict[int, ParameterLayout] = {}
    everywhere = places(model)
    for name, layout in layouts.items():
        by_tensor[id(everywhere[name].tensor)] = layout
    found = {name: by_tensor.get(id(place.tensor), WHOLE) for name, place in everywhere.items()}
    return {name: layout for name, layout in found.items() if layout != WHOLE}


def agreed_starts(mesh: ReplicaMesh, starts: Sequence[int], limit_s: float) -> Sequence[int]:
    """Those of the replica's first rank: ranks with parts of other sizes may estimate other times. Raises DisagreementError if
    it does not answer within `limit_s`."""
    told = broadcast(json.dumps(list(starts)).encode(), mesh.group(), limit_s, "cpu")
    return [int(start) for start in json.loads(told)]


def check_optimizers(registered: Registered) -> None:
    """Raises MisuseError for optimizers that cannot update parts of parameters."""
    check_kinds(registered, "tp")
    for key, optimizer in registered.optimizers.items():
        if type(optimizer).__name__ in _OF_MATRICES:
            raise MisuseError(
                f"optimizer {key}: {type(optimizer).__name__} needs whole matrices, and tp ranks have parts of them; take "
                "AdamW or SGD, or train with mesh.tp=1"
            )
