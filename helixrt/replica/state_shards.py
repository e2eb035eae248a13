"""A `State` as the named tensors that are fetched, digested and written to checkpoints, and back.

The scalars travel as one tensor of bytes, `scalars`, which holds their JSON; a state without scalars has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from helixrt.replica.contracts import State

SCALARS = "scalars"


def shards_of(state: State) -> dict[str, torch.Tensor]:
    """The state's live tensors, detached, in their order, and its scalars as they are now."""
    assert SCALARS not in state.tensors, f"no tensor of a state may be called {SCALARS!r}"
    shards = {name: tensor.detach() for name, tensor in state.tensors.items()}
    if state.scalars:
        text = json.dumps(dict(state.scalars), sort_keys=True, separators=(",", ":"))
        shards[SCALARS] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return shards


def state_of(shards: Mapping[str, torch.Tensor]) -> State:
    """The state that `shards_of` gave these shards for. Raises ValueError for scalars that are not a JSON object."""
    tensors = {name: tensor for name, tensor in shards.items() if name != SCALARS}
    if SCALARS not in shards:
        return State(tensors)
    scalars = json.loads(bytes(shards[SCALARS].cpu().tolist()))
    if not isinstance(scalars, dict):
        raise ValueError(f"the scalars of a state are {type(scalars).__name__}, not an object")
    return State(tensors, scalars)
