"""The replicated state of a DeepSpeed engine as named tensors and scalars, and back.

    parameter/NAME             ZeRO 1 and 2: the parameter; ZeRO 3: this rank's partition of it, flat; frozen ones too
    master/NUMBER              this rank's partition of the float32 weights, where they are no views of the parameters
    optimizer/0/…, scheduler/0/…, running_buffer/NAME, buffer/NAME      as for a module (`replicated_state`)
    engine/COUNTER             DeepSpeed's own counters

The optimizer's parameters are the masters, `master0` and so on. Each rank stores, serves and digests its own partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from helixrt.engines.buffers import Buffers
from helixrt.engines.deepspeed_private import Partitions
from helixrt.engines.optimizer_state import check_optimizer, load_optimizer, read_optimizer
from helixrt.engines.registered import Registered
from helixrt.engines.state_tree import Tree, flatten, placed
from helixrt.errors import Fatal
from helixrt.replica.contracts import Scalar, State
from helixrt.replica.portions import MODEL, NOT_PERSISTENT, Portion

_OPTIMIZER, _SCHEDULER, ENGINE = "optimizer/0", "scheduler/0", "engine"
_TENSORS = ("parameter/", "running_buffer/", "buffer/", "master/")  # whose names do not change


class DeepSpeedState:
    """`registered` holds the engine's module alone, `scheduler` is the engine's, or None."""

    def __init__(self, registered: Registered, buffers: Buffers, partitions: Partitions, scheduler: Any) -> None:
        self._parameters = dict(registered.parameters())
        self._buffers, self._partitions, self._scheduler = buffers, partitions, scheduler
        self._names: Mapping[torch.Tensor, str] = {master: f"master{n}" for n, master in enumerate(partitions.masters)}

    def read(self) -> State:
        """Live tensors, and scalars as they are now. Raises MisuseError for an entry that cannot be stored, with its path."""
        tensors, scalars = self._fixed(), dict[str, Scalar]()
        with self._partitions.groups() as optimizer:
            flatten(_OPTIMIZER, read_optimizer(optimizer, self._names, _OPTIMIZER), tensors, scalars)
        if self._scheduler is not None:
            flatten(_SCHEDULER, self._scheduler.state_dict(), tensors, scalars)
        flatten(ENGINE, self._partitions.counters(), tensors, scalars)
        return State(tensors, scalars)

    def portions(self, rank: int) -> dict[str, Portion]:
        """Where each rank has whole parameters, these and the buffers; a partition of ZeRO 3 is no box of its parameter."""
        if not self._partitions.whole_parameters:
            return {}
        named: dict[str, tuple[str, str, torch.Tensor]] = {}
        for name, parameter in self._parameters.items():
            named[f"parameter/{name}"] = MODEL, name, parameter
        for path, tensor in self._buffers.state().items():
            name = path.split("/", 1)[1]
            named[path] = (NOT_PERSISTENT if name in self._buffers.not_persistent else MODEL, name, tensor)
        return {path: Portion.whole(f"{first}/{name}", t.shape, rank == 0) for path, (first, name, t) in named.items()}

    def load(self, state: State) -> None:
        """Take over a state; all ranks of the replica together. Raises Fatal, before anything is changed, for one that is not
        of this engine."""
        live = self._fixed()
        self._check(state.tensors, live)
        entries = [*state.tensors.items(), *state.scalars.items()]
        tree = Tree((name, value) for name, value in entries if not name.startswith(_TENSORS))
        optimizer_state, scheduler_state = tree.under(_OPTIMIZER), tree.under(_SCHEDULER)
        counters = tree.under(ENGINE) or {}
        if missing := self._partitions.counters().keys() - counters.keys():
            raise Fatal(f"the state to load lacks {ENGINE}/{min(missing)}")
        if self._scheduler is not None and scheduler_state is None:
            raise Fatal(f"the state to load lacks {_SCHEDULER}")
        with self._partitions.groups() as optimizer:
            check_optimizer(optimizer, self._names, optimizer_state, _OPTIMIZER)
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(state.tensors[name])
            self._buffers.load(state.tensors)
            load_optimizer(optimizer, self._names, optimizer_state)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(placed(scheduler_state, self._scheduler.state_dict()))
        self._partitions.set_counters(counters)
        self._partitions.loaded()

    def _fixed(self) -> dict[str, torch.Tensor]:
        """What is there from the beginning, live."""
        tensors = {f"parameter/{name}": self._partitions.parameter(p).detach() for name, p in self._parameters.items()}
        tensors |= self._buffers.state()
        return tensors | {f"master/{n}": master.detach() for n, master in self._partitions.own_masters().items()}

    def _check(self, given: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
        if missing := [name for name in live if name not in given]:
            raise Fatal(f"the state to load lacks {missing[0]} ({len(missing)} missing in all)")
        for name, tensor in live.items():
            if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype:
                what = f"{given[name].dtype}{list(given[name].shape)}"
                raise Fatal(f"the state to load has {name} as {what}, not {tensor.dtype}{list(tensor.shape)}")
        if unknown := [name for name in given if name.startswith(_TENSORS) and name not in live]:
            raise Fatal(f"the state to load has {unknown[0]}, which this engine does not have")
