"""What tp ranks hold alike: found in a model that a plan has cut, and compared bit for bit.

In: registered models, their replicated state, the tp ranks. Out: nothing, or an error that names the first entry that differs.
"""

from __future__ import annotations

import hashlib
import json

import torch

from helixrt.engines.registered import Registered
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.sharded import check_kinds, is_sharded, local, placement_on
from helixrt.engines.tensor_gradients import TensorRanks
from helixrt.errors import Fatal, MisuseError

_OTHERS = ("extra/", "dtensor/")  # what a user's own object holds may be parts


def check_tensor(registered: Registered, ranks: TensorRanks, sharded: bool) -> None:
    """Raises MisuseError for what cannot be trained over tp ranks. `sharded`: over dp_shard ranks too.

    An optimizer for which nobody has chosen how it updates many parameters updates one after the other: the default on CUDA
    devices takes all in one call, which DTensors and plain tensors do not share.
    """
    check_kinds(registered, "tp")
    parameters = dict(registered.parameters())
    for name, parameter in parameters.items():
        placement = placement_on(parameter, ranks.group.mesh) if is_sharded(parameter) else None
        if placement is not None and placement.is_partial():
            raise MisuseError(f"{name} is a DTensor with the placement {placement}; parameters are cut, or whole on every rank")
        if is_sharded(parameter) and placement is None and not sharded:
            raise MisuseError(f"{name} is a DTensor over other ranks than the {ranks.group.size} tp ranks of this replica")
    if not any(ranks.cuts(parameter) for parameter in parameters.values()):
        raise MisuseError(
            "no parameter is cut over the tp ranks of this replica; call session.parallelize(model) before the optimizer is "
            "made, with tp_plan={...} for a model without a plan of its own"
        )
    for key, optimizer in registered.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            if len({getattr(parameter, "device_mesh", None) for parameter in group["params"]}) == 1:
                continue
            if group.get("foreach") or group.get("fused"):
                raise MisuseError(
                    f"optimizer {key} updates the parameters of group {number} in one call (foreach or fused), and some are "
                    "cut over tp and others whole; leave foreach and fused out, or make a group of each kind"
                )
            if "foreach" in group:
                group["foreach"] = False


def check_copies(state: ReplicatedState, ranks: TensorRanks) -> None:
    """Compare what is not cut over tp: parameters, buffers, optimizers, schedulers. Raises Fatal with the first name that
    differs; all tp ranks call it."""
    hashes = _hashes(state, ranks)
    device = ranks.group.mesh.device_type
    counts = ranks.group.gather(torch.tensor([len(hashes)], dtype=torch.int64, device=device))
    if len({int(count) for count in counts}) > 1:
        raise Fatal(
            f"tp ranks of this replica hold {[int(count) for count in counts]} entries of the state; they must hold the same"
        )
    mine = torch.tensor(list(hashes.values()), dtype=torch.int64, device=device)
    first, *others = ranks.group.gather(mine)
    for number, other in enumerate(others, 1):
        for name, here, there in zip(hashes, first.tolist(), other.tolist(), strict=True):
            if here != there:
                raise Fatal(
                    f"{name} differs between the tp ranks 0 and {number} of this replica, which hold it whole and must hold "
                    "the same bits: build the model alike on all ranks, and let the update depend on registered state, "
                    "gradients and record alone"
                )


def _hashes(state: ReplicatedState, ranks: TensorRanks) -> dict[str, int]:
    tensors, scalars = state.entries()
    found = {name: _number(json.dumps(value).encode()) for name, value in scalars.items() if not name.startswith(_OTHERS)}
    for name, tensor in tensors.items():
        if not name.startswith(_OTHERS) and not ranks.cuts(tensor):
            found[name] = _number(local(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found


def _number(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)
