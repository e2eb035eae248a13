"""The replicated state of a user's training as named tensors and scalars, and back.

    parameter/NAME, running_buffer/NAME, buffer/NAME         tensors, from registration on
    optimizer/KEY/state/PARAMETER/…, optimizer/KEY/group/…   from the optimizer's first step on
    optimizer/KEY/more/…                                     what else the optimizer's own state_dict() gives
    scheduler/KEY/…, scaler/…, extra/KEY/…                   what their state_dict() gives
    dtensor/PATH                                             full shape and placement of the DTensor PATH

Of a DTensor, `PATH` is this rank's local part. So each rank stores, serves and digests its own shard.

Names follow parameters, not their numbers, so that they stay when a model gains a layer elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from helixrt.engines.buffers import Buffers
from helixrt.engines.optimizer_state import check_optimizer, load_optimizer, read_optimizer
from helixrt.engines.registered import Registered, qualified
from helixrt.engines.sharded import is_sharded, local, placed_by, placement_of, stands_for_others
from helixrt.engines.state_tree import Tree, flatten, placed, segment
from helixrt.errors import Fatal, MisuseError
from helixrt.replica.contracts import Scalar, State

_KINDS = ("parameter", "running_buffer", "buffer", "optimizer", "scheduler", "scaler", "extra", "dtensor")
PLACEMENTS = "dtensor/"
_TENSORS = ("parameter/", "running_buffer/", "buffer/")  # that the modules have themselves


class ReplicatedState:
    def __init__(self, registered: Registered, buffers: Buffers) -> None:
        self._registered, self._buffers = registered, buffers
        self._parameters = dict(registered.parameters())
        self._names: Mapping[torch.Tensor, str] = {parameter: name for name, parameter in self._parameters.items()}

    def read(self) -> State:
        """Live tensors, and scalars as they are now. Raises MisuseError for an entry that cannot be stored, with its path."""
        tensors, scalars = self.entries()
        scalars |= {PLACEMENTS + path: placement_of(tensor, path) for path, tensor in tensors.items() if is_sharded(tensor)}
        parts = {path: local(tensor) for path, tensor in tensors.items()}
        for path, part in parts.items():
            if stands_for_others(part):
                raise MisuseError(
                    f"{path} is a {type(part).__name__}, a tensor that stands for others; the state may hold plain tensors and "
                    "DTensors, so take an optimizer or an object that keeps those (bitsandbytes has 8-bit optimizers that do)"
                )
        return State(parts, scalars)

    @property
    def other_names(self) -> Mapping[str, Sequence[str]]:
        """Of a tensor that the models' `state_dict` has under several names, all but the first, by the first."""
        names: dict[int, list[str]] = {}
        for model, module in self._registered.models.items():
            tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
            for name, tensor in tensors:
                names.setdefault(id(tensor), []).append(qualified(model, name))
        return {first: others for first, *others in names.values() if others}

    @property
    def not_persistent(self) -> Collection[str]:
        """Names of buffers that the models' `state_dict` does not have."""
        return self._buffers.not_persistent

    def entries(self) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
        """The same with DTensors whole, and without their placements."""
        tensors: dict[str, torch.Tensor] = {f"parameter/{name}": p.detach() for name, p in self._parameters.items()}
        tensors |= self._buffers.state()
        scalars: dict[str, Scalar] = {}
        for key, optimizer in self._registered.optimizers.items():
            path = f"optimizer/{segment(key)}"
            flatten(path, read_optimizer(optimizer, self._names, path), tensors, scalars)
        for path, thing in self._things():
            flatten(path, thing.state_dict(), tensors, scalars)
        return tensors, scalars

    def load(self, state: State) -> None:
        """Take over a state. Raises Fatal, before anything is changed, for one that is not of the registered objects."""
        for name in (*state.tensors, *state.scalars):
            if name.split("/", 1)[0] not in _KINDS:
                raise Fatal(f"the state to load has the unknown entry {name}")
        tensors = self._placed(state)
        self._check_tensors(tensors)
        entries = [*tensors.items(), *state.scalars.items()]
        tree = Tree((name, value) for name, value in entries if not name.startswith((*_TENSORS, PLACEMENTS)))
        optimizers = {key: tree.under(f"optimizer/{segment(key)}") for key in self._registered.optimizers}
        for key, optimizer in self._registered.optimizers.items():
            check_optimizer(optimizer, self._names, optimizers[key], f"optimizer/{key}")
        things = [(path, thing, tree.under(path)) for path, thing in self._things()]
        for path, thing, value in things:
            if value is None and thing.state_dict():
                raise Fatal(f"the state to load lacks {path}")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                local(parameter).copy_(local(tensors[f"parameter/{name}"]))
        self._buffers.load(tensors)
        for key, optimizer in self._registered.optimizers.items():
            load_optimizer(optimizer, self._names, optimizers[key])
        for _, thing, value in things:
            if value is not None:
                thing.load_state_dict(placed(value, thing.state_dict()))

    def _placed(self, state: State) -> dict[str, torch.Tensor]:
        """The state's tensors, as DTensors where it declares them so."""
        meshes = list({p.device_mesh: None for p in self._parameters.values() if is_sharded(p)})  # type: ignore[attr-defined]
        tensors = dict(state.tensors)
        for name, text in state.scalars.items():
            if name.startswith(PLACEMENTS):
                path = name.removeprefix(PLACEMENTS)
                if path not in tensors:
                    raise Fatal(f"the state to load describes {path} and does not hold it")
                device = meshes[0].device_type if meshes else "cpu"
                tensors[path] = placed_by(text, tensors[path].to(device), meshes, path)
        return tensors

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        live = {f"parameter/{name}": p.detach() for name, p in self._parameters.items()} | self._buffers.state()
        if missing := [name for name in live if name not in tensors]:
            raise Fatal(f"the state to load lacks {missing[0]} ({len(missing)} missing in all)")
        for name, tensor in live.items():
            if tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
                what = f"{tensors[name].dtype}{list(tensors[name].shape)}"
                raise Fatal(f"the state to load has {name} as {what}, not {tensor.dtype}{list(tensor.shape)}")
            if _placement(tensors[name], name) != _placement(tensor, name):
                raise Fatal(f"the state to load has {name} in another placement than this replica")
        if unknown := [name for name in tensors if name.startswith(_TENSORS) and name not in live]:
            raise Fatal(f"the state to load has {unknown[0]}, which the registered models do not have")

    def _things(self) -> Iterator[tuple[str, Any]]:
        for key, scheduler in self._registered.schedulers.items():
            yield f"scheduler/{segment(key)}", scheduler
        if self._registered.scaler is not None:
            yield "scaler", self._registered.scaler
        for key, thing in self._registered.extra.items():
            yield f"extra/{segment(key)}", thing


def _placement(tensor: torch.Tensor, what: str) -> str:
    return placement_of(tensor, what) if is_sharded(tensor) else ""
