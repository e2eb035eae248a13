"""Models whose parameters FSDP2 has sharded over the ranks of a replica: applying it, and what an engine must know of them.

In: a module, the replica's inner group. Out: the module with `fully_shard` applied, whose parameters are DTensors; for the
engine their local parts, descriptions of their placement, and which of them the rank's own backward used.

A parameter's local part may be empty: dimension 0 is cut as `torch.chunk` cuts it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.registered import Registered
from helixrt.errors import Fatal, MisuseError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)
_UNSHARDED = frozenset((torch.Tensor, nn.Parameter))  # types

# ---------------------------------------------------------------- tensors


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor. Importing their module takes long; if it was not imported, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, live; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # else it is a differentiable copy of the handle
        return tensor.to_local()  # type: ignore[attr-defined]


def is_scalar(parameter: torch.Tensor) -> bool:
    """Whether it has no dimension, so that FSDP2 cannot cut it: all ranks hold it whole."""
    return parameter.dim() == 0 and not is_sharded(parameter)


def stands_for_others(part: torch.Tensor) -> bool:
    """Whether a tensor that is no DTensor has its numbers in other tensors, as a quantized one, and no memory of its own."""
    return type(part).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def version(tensor: torch.Tensor) -> int:
    """Grows when the tensor is changed in place. A DTensor counts operations on itself, its local part those on that part."""
    return tensor._version + local(tensor)._version if is_sharded(tensor) else tensor._version


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`version` of each. A step asks for those of every parameter, several times."""
    return [tensor._version if type(tensor) in _UNSHARDED else version(tensor) for tensor in tensors]


def over(part: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor with the shape and placement of the DTensor `like` whose local part is `part`."""
    return _assemble(part, like.device_mesh, like.placements, tuple(like.shape), tuple(like.stride()))


def _assemble(
    part: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def placement_on(tensor: Any, axis: DeviceMesh) -> Any:
    """How a DTensor is placed over a one-dimensional mesh, which may be an axis of its own mesh; None where it is not."""
    if tensor.device_mesh == axis:
        return tensor.placements[0]
    names, wanted = tensor.device_mesh.mesh_dim_names or (), axis.mesh_dim_names or ("",)
    return tensor.placements[names.index(wanted[0])] if wanted[0] in names else None


def placement_of(tensor: Any, what: str) -> str:
    """Full shape, stride, placements and ranks of a DTensor as JSON. Raises MisuseError for a placement that is neither a shard
    of one dimension nor a replica."""
    from torch.distributed.tensor import Replicate, Shard

    from helixrt.engines.dtensor_private import factor_of

    placements: list[int | list[int] | None] = []  # a dimension, with its factor for a strided shard, or None for a replica
    for placement in tensor.placements:
        factor = factor_of(placement)
        if factor is None and type(placement) not in (Shard, Replicate):
            raise MisuseError(f"{what} is a DTensor with the placement {placement}; the state may hold shards and replicas")
        cut = [placement.dim, factor] if factor is not None else None if type(placement) is Replicate else placement.dim
        placements.append(cut)
    return json.dumps([list(tensor.shape), list(tensor.stride()), placements, _ranks_of(tensor.device_mesh)])


def _ranks_of(mesh: DeviceMesh) -> int | dict[str, int]:
    """Of a mesh of dp_shard ranks alone their number, of any other the sizes of its axes by name."""
    names = mesh.mesh_dim_names
    return mesh.size() if names is None or names == ("dp_shard",) else dict(zip(names, mesh.shape, strict=True))


def placed_by(text: object, part: torch.Tensor, meshes: Sequence[DeviceMesh], what: str) -> torch.Tensor:
    """The DTensor that `placement_of` described, over a local part and one of these meshes. Raises Fatal for a description that
    does not fit."""
    from torch.distributed.tensor import Replicate, Shard

    from helixrt.engines.dtensor_private import strided_shard

    try:
        shape, stride, dims, ranks = json.loads(str(text))
        placements = [
            Replicate() if dim is None else strided_shard(*map(int, dim)) if isinstance(dim, list) else Shard(int(dim))
            for dim in dims
        ]
        mesh = next((mesh for mesh in meshes if _ranks_of(mesh) == ranks), None)
        if mesh is None:
            here = " or ".join(str(_ranks_of(mesh)) for mesh in meshes) or "1"
            raise Fatal(f"the state to load has {what} cut for {ranks} ranks, and this replica has {here}")
        return _assemble(part, mesh, placements, tuple(shape), tuple(stride))
    except (ValueError, TypeError) as error:
        raise Fatal(f"the state to load describes the placement of {what} as {str(text)[:80]!r}") from error


# ---------------------------------------------------------------- applying fully_shard


def shard_model(
    model: Module,
    group: InnerGroup,
    compute_dtype: torch.dtype,
    *,
    ignored: Collection[nn.Parameter] = (),
    gathered: bool = False,
) -> Module:
    """Apply `fully_shard` over the group: to each block of the model, then to the rest. Modules to which the user has applied
    it are left as they are, with all that is in them. With a compute type other than float32, parameters are gathered and
    used in it, gradients are reduced in float32, and the model's output is float32. `ignored` parameters and those without
    dimensions are not sharded. `gathered`: those that a forward has gathered stay so until `reshard`.

    Raises MisuseError for a model whose parameters have no values yet.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise MisuseError(f"{empty[0]} is on the meta device; build the model with values before session.parallelize")
    inner = outer = MixedPrecisionPolicy()
    if compute_dtype is not torch.float32:
        inner = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        outer = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    if isinstance(model, FSDPModule):
        return model
    others, freed = {*ignored, *filter(is_scalar, model.parameters())}, False if gathered else None

    def shard(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        sharded = fully_shard(
            module, mesh=group.mesh, mp_policy=policy, ignored_params=others, reshard_after_forward=freed
        )
        if gathered:
            sharded.set_reshard_after_backward(False, recurse=False)

    for block in blocks(model):
        if not isinstance(block, FSDPModule):
            shard(block, inner)
    shard(model, outer)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules to gather one at a time: of the classes that `_no_split_modules` names (as Hugging Face models have it),
    else the elements of the outermost `ModuleList`s, and `ModuleDict`s with numbers as keys, whose elements are all of one
    class. None inside another, or inside a module that is sharded already."""
    from torch.distributed.fsdp import FSDPModule

    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if _class(child).__name__ in named:
                found.append(child)
            elif not named and _is_stack(child):
                found.extend(child.children())
            elif not isinstance(child, FSDPModule):
                look(child)

    look(model)
    distinct = {id(block): block for block in found}
    return [block for block in distinct.values() if next(block.parameters(), None) is not None]


def _is_stack(module: nn.Module) -> bool:
    """Whether its children are layers of one class, one after the other."""
    numbered = isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
    return (isinstance(module, nn.ModuleList) or numbered) and len({_class(child) for child in module.children()}) == 1


def _class(module: nn.Module) -> type:
    """The module's class before `fully_shard` gave it a derived one."""
    from torch.distributed.fsdp import FSDPModule

    bases = type(module).__bases__
    return next(base for base in bases if base is not FSDPModule) if FSDPModule in bases else type(module)


# ---------------------------------------------------------------- what the engine knows


class ShardedModels:
    """The registered models of one engine. `close` takes the hooks away.

    Sums without division are set for all `FSDPModule`s, and zeros for parameters that a rank did not use, so that all ranks
    reduce the same tensors. Raises MisuseError for a parameter that has dimensions and is not sharded over the group, but for
    those `elsewhere`.
    """

    def __init__(self, registered: Registered, group: InnerGroup, elsewhere: Collection[nn.Parameter] = ()) -> None:
        _check(registered, group, elsewhere)
        self._used: set[int] = set()
        self._calls = Counter[int]()  # of each module's forward since the newest backward, by number
        self._modules = list(_fsdp_modules(registered.models))
        self._ends = []
        from helixrt.engines.fsdp_private import watch_used

        for number, (_, module) in enumerate(self._modules):
            module.set_force_sum_reduction_for_comms(True)  # else Gloo refuses the factor
            module.set_gradient_divide_factor(1.0)
            module.set_reduce_scatter_unused_params(True, recurse=False)
            self._ends.append(watch_used(module, lambda parameter: self._used.add(id(parameter))))
            self._ends.append(module.register_forward_pre_hook(partial(self._called, number)).remove)

    def _called(self, number: int, *unused: object) -> None:
        self._calls[number] += torch.is_grad_enabled()

    def begin(self) -> None:
        """A batch begins: no parameter was used. Raises MisuseError if gradients would not be reduced."""
        from helixrt.engines.fsdp_private import reduces

        self._used.clear()
        self._calls.clear()
        for name, module in self._modules:
            if not reduces(module):
                raise MisuseError(
                    f"set_requires_gradient_sync(False) was called on {name}; gradients are reduced inside the replica in each "
                    "micro-batch, so leave it at True"
                )

    def before_backward(self) -> set[int]:
        """Ids of the parameters that the backward of what was computed since the last one may reduce more than once: of modules
        that were called several times."""
        several = [self._modules[number][1] for number, calls in self._calls.items() if calls > 1]
        self._calls.clear()
        return {id(parameter) for module in several for parameter in module.parameters()}

    def used(self, parameter: torch.Tensor) -> bool:
        """Whether a backward of this rank gave the parameter a gradient since `begin`."""
        return id(parameter) in self._used

    def whole(self) -> list[torch.Tensor] | None:
        """The gathered parameters, which are what a loss depends on; None if they are not known."""
        from helixrt.engines.fsdp_private import gathered

        found = [gathered(module) for _, module in self._modules]
        return None if None in found else [parameter for each in found for parameter in each or ()]

    def reshard(self) -> None:
        """Free gathered parameters (an evaluation leaves some): they would keep their values over an update."""
        for _, module in self._modules:
            module.reshard()

    def close(self) -> None:
        for end in self._ends:
            end()
        self._ends.clear()


def _fsdp_modules(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    from torch.distributed.fsdp import FSDPModule

    seen: set[int] = set()
    for model in models.values():
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and id(module) not in seen:
                seen.add(id(module))
                yield name or type(module).__name__, module


def check_kinds(registered: Registered, axis: str) -> None:
    """Raises MisuseError for what cannot be trained with parameters cut over this axis of the mesh."""
    if registered.scaler is not None:
        raise MisuseError(f"a gradient scaler is not supported with Mesh({axis}=...); train in bfloat16, which needs none")
    for key, optimizer in registered.optimizers.items():
        if isinstance(optimizer, torch.optim.Adafactor):
            raise MisuseError(f"optimizer {key}: PyTorch's Adafactor does not work on sharded parameters; take AdamW or SGD")


def check_updates(registered: Registered) -> None:
    """Raises MisuseError for an optimizer that would update DTensors and plain tensors, or DTensors of several meshes, in one
    call. Without a chosen way to update many parameters it updates one after the other: the default on CUDA
    devices takes all in one call."""
    for key, optimizer in registered.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            if len({getattr(parameter, "device_mesh", None) for parameter in group["params"]}) <= 1:
                continue
            if group.get("foreach") or group.get("fused"):
                raise MisuseError(
                    f"optimizer {key} updates the parameters of group {number} in one call (foreach or fused), and some are "
                    "cut over ranks as DTensors and others are not, or over other ranks; leave foreach and fused out, or make "
                    "a group of each kind"
                )
            if "foreach" in group:
                group["foreach"] = False


def _check(registered: Registered, group: InnerGroup, elsewhere: Collection[nn.Parameter]) -> None:
    check_kinds(registered, "dp_shard")
    others = {id(parameter) for parameter in elsewhere}
    for name, parameter in registered.parameters():
        if id(parameter) in others or is_scalar(parameter):
            continue
        placement = placement_on(parameter, group.mesh) if is_sharded(parameter) else None
        if placement is None or placement.is_replicate():
            raise MisuseError(
                f"{name} is not sharded over the {group.size} ranks of this replica; call session.parallelize(model), or "
                "fully_shard(model, mesh=session.device_mesh), before the optimizer is made"
            )
