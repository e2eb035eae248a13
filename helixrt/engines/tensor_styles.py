"""Tensor-parallel styles by name: what a plan may say of a module, applied over the tp ranks by DTensor.

In: a module, a one-dimensional device mesh. Out: its parameters as DTensors, and hooks on its forward that turn its plain input
into the DTensor that the style expects, and its output into a plain tensor again. Names and meanings are those of the plans of
Hugging Face transformers:

    colwise                 outputs are cut over the ranks: each rank has its part of the last dimension of the output
    colwise_gather_output   the same, and every rank has the whole output
    rowwise                 inputs are cut: the rank's input is its part of the last dimension; the ranks' outputs are summed
    rowwise_split_input     the same for an input that every rank has whole
    embedding_rowwise       the rows of an embedding are cut: outputs of the ranks are summed
    embedding_colwise       the columns of an embedding are cut: every rank has the whole output
    sequence_parallel       parameters are whole on every rank, which computes its part of dimension 1 (the sequence)
    moe_tp_experts          a module of several experts whose weights are cut (its parameters have entries of their own):
                            each rank computes its part of every expert; outputs are summed
    replicated_with_grad_allreduce   parameters are whole on every rank, and each rank's gradient is one term of their sum
    replicate               parameters are whole on every rank, which computes all

and of the parameters of experts, as [expert, out, in]: colwise, rowwise, and packed_colwise for two matrices packed into out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from helixrt.errors import MisuseError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLWISE, ROWWISE, PACKED = "colwise", "rowwise", "packed_colwise"
TERMS = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_WHOLE = ("replicate", TERMS)
_GATHERED, _SPLIT = ("colwise_gather_output", "colwise_rep"), ("rowwise_split_input", "rowwise_rep")
MODULE_STYLES = (
    COLWISE, *_GATHERED, ROWWISE, *_SPLIT, "embedding_rowwise", "embedding_colwise", "sequence_parallel", _EXPERTS, *_WHOLE,
)  # fmt: skip
PARAMETER_STYLES = (COLWISE, ROWWISE, PACKED, *_WHOLE)
_SPREAD = ("ep_router", "ep_dispatch_experts", "grouped_gemm")  # styles of transformers for whole experts on each rank


def apply_style(style: str, module: nn.Module, where: str, mesh: DeviceMesh) -> None:
    """Raises MisuseError for a style that is not one of modules, a module that it does not fit, and sizes that the number of
    ranks does not divide where it must."""
    if style not in MODULE_STYLES:
        raise _unknown(style, f"module {where}", "modules", MODULE_STYLES)
    if style in _WHOLE:
        return
    if style == _EXPERTS:
        _apply_experts(module, where, mesh)
    elif _is_transposed(module):
        _apply_transposed(style, module, where, mesh)
    else:
        _apply_public(style, module, where, mesh)


def _unknown(style: str, where: str, kinds: str, known: Sequence[str]) -> MisuseError:
    rule = f"styles of {kinds} are {', '.join(known)}"
    if style in _SPREAD:
        rule = (
            "it spreads whole experts over ranks, which unmodified models cannot do. Cut each expert over the tp ranks "
            f"({_EXPERTS!r} for the experts, {PACKED!r} and {ROWWISE!r} for their weights), or write the model's parts for "
            "helixrt.Stages"
        )
    return MisuseError(f"the plan has {style!r} for the {where}; {rule}")


def _apply_public(style: str, module: nn.Module, where: str, mesh: DeviceMesh) -> None:
    """By torch's own styles."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    embedding = style.startswith("embedding_")
    kind = nn.Embedding if embedding else nn.Linear
    if style != "sequence_parallel" and not isinstance(module, kind):
        raise MisuseError(
            f"the plan has {style!r} for {where}, which is a {type(module).__name__}, not a {kind.__name__}; leave it out, or "
            "give a torch.distributed.tensor.parallel.ParallelStyle that fits it"
        )
    if style == COLWISE:
        _check_divides(module.out_features, mesh, f"outputs of {where}")
        chosen: Any = ColwiseParallel()
    elif style == ROWWISE:
        _check_divides(module.in_features, mesh, f"inputs of {where}")
        chosen = RowwiseParallel()
    elif style in _GATHERED or style == "embedding_colwise":
        chosen = ColwiseParallel(output_layouts=Replicate())
    elif style == "sequence_parallel":
        chosen = SequenceParallel(use_local_output=True)
    else:
        chosen = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(module, mesh, chosen)


def _check_divides(size: Any, mesh: DeviceMesh, what: str) -> None:
    if int(size) % mesh.size():
        raise MisuseError(f"{size} {what} cannot be cut into {mesh.size()} equal parts (mesh.tp={mesh.size()})")


# ---------------------------------------------------------------- linear layers with [in, out] weights


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is [in, out], as GPT-2 has them (`transformers.pytorch_utils.Conv1D`)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", torch.empty(0)).dim() == 2


def _apply_transposed(style: str, module: nn.Module, where: str, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    columns = style == COLWISE or style in _GATHERED
    if not columns and style != ROWWISE and style not in _SPLIT:
        raise MisuseError(f"the plan has {style!r} for {where}, which is a linear layer (Conv1D): colwise or rowwise fit it")
    inputs, outputs = module.weight.shape  # type: ignore[misc]
    if style in (COLWISE, ROWWISE):
        _check_divides(outputs if columns else inputs, mesh, f"{'outputs' if columns else 'inputs'} of {where}")
    given = Shard(-1) if style == ROWWISE else Replicate()
    wanted = Replicate() if columns else Shard(-1)
    result = Shard(-1) if style == COLWISE else Replicate()
    cuts = {"weight": Shard(1), "bias": Shard(0)} if columns else {"weight": Shard(0), "bias": Replicate()}

    def cut(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(part.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter, mesh, [cuts[key]])
            part.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))

    def before(part: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
        return _as_dtensor(args[0], mesh, given).redistribute(placements=[wanted]), *args[1:]

    def after(part: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
        return output.redistribute(placements=[result]).to_local()

    distribute_module(module, mesh, cut, before, after)  # type: ignore[arg-type]  # its annotation says None


def _as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [placement], run_check=False)


# ---------------------------------------------------------------- experts


def cut_parameter(style: str, module: nn.Module, key: str, where: str, mesh: DeviceMesh) -> None:
    """Cut a parameter [expert, out, in] of a module of experts by its own entry in a plan. Raises as `apply_style` does."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from helixrt.engines.dtensor_private import strided_shard

    if style not in PARAMETER_STYLES:
        raise _unknown(style, f"parameter {where}", "parameters", PARAMETER_STYLES)
    if style in _WHOLE:
        return
    parameter = module._parameters[key]
    assert parameter is not None
    if parameter.dim() != 3:
        raise MisuseError(
            f"the plan has {style!r} for the parameter {where} of shape {list(parameter.shape)}; weights of experts are "
            "[expert, out, in], and others are cut by the entry of their module"
        )
    dim, packed = (2 if style == ROWWISE else 1), (2 if style == PACKED else 1)
    if parameter.shape[dim] % (packed * mesh.size()):
        raise MisuseError(
            f"dimension {dim} of {where} has {parameter.shape[dim]} elements, which {style!r} cannot cut into {packed} x "
            f"{mesh.size()} equal parts (mesh.tp={mesh.size()})"
        )
    placement = strided_shard(dim, packed) if packed > 1 else Shard(dim)
    placed = distribute_tensor(parameter.detach(), mesh, [placement])
    module.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _apply_experts(module: nn.Module, where: str, mesh: DeviceMesh) -> None:
    """The forward of a rank uses its parts of the weights, and gives one term of the output. Gradients of its inputs, the
    hidden states and the routing weights, are terms too, and are summed in backward."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    if whole := [key for key, parameter in own.items() if not isinstance(parameter, DTensor)] or ([] if own else ["weights"]):
        raise MisuseError(
            f"the plan has {_EXPERTS!r} for {where}, and {whole[0]} is not cut: each rank would add it once more. Give all "
            f"parameters of {where} entries of their own: {COLWISE}, {ROWWISE} or {PACKED}"
        )
    cut: dict[str, Any] = {}

    def before(part: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cut.clear()
        for key, parameter in part._parameters.items():
            if isinstance(parameter, DTensor):
                cut[key] = parameter
        for key, parameter in cut.items():
            part._parameters[key] = parameter.to_local()
        return tuple(map(summed, args)), {key: summed(value) for key, value in options.items()}

    def summed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return _as_dtensor(value, mesh, Replicate()).to_local(grad_placements=[Partial()])

    def after(part: nn.Module, args: tuple[Any, ...], output: Any) -> torch.Tensor | None:
        part._parameters.update(cut)
        cut.clear()
        if output is None:  # the forward has raised
            return None
        return _as_dtensor(output, mesh, Partial()).redistribute(placements=[Replicate()]).to_local()

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)
