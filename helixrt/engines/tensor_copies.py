"""What must be equal on tp ranks: found in a model that a plan has cut, and compared bit for bit.

In: registered models, their replicated state, the tp ranks. Out: nothing, or an error that names the first entry that differs.
"""

from __future__ import annotations

import torch

from helixrt.engines.copies import Copies, held_in
from helixrt.engines.registered import Registered
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.sharded import check_kinds, check_updates, is_sharded, placement_on
from helixrt.engines.tensor_gradients import TensorRanks
from helixrt.errors import MisuseError


def check_tensor(registered: Registered, ranks: TensorRanks, sharded: bool) -> None:
    """Raises MisuseError for what cannot be trained over tp ranks. `sharded`: over dp_shard ranks too."""
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
    check_updates(registered)


def check_copies(state: ReplicatedState, ranks: TensorRanks) -> None:
    """Compare what is not cut over tp: parameters, buffers, optimizers, schedulers. Raises Fatal with the first name that
    differs; all tp ranks call it."""

    def cut(name: str, tensor: torch.Tensor | None) -> tuple[str, ...] | None:
        return None if tensor is not None and ranks.cuts(tensor) else ()

    Copies(ranks.group, [{"tp": rank} for rank in range(ranks.group.size)]).check(held_in(state, cut))
