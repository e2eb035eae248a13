"""A `State` as the named tensors that are fetched, digested and written to checkpoints, and back.

The scalars travel as one tensor of bytes, `scalars`, which holds their JSON; a state without scalars has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch

from helixrt.replica.commands import Digested
from helixrt.replica.contracts import State

SCALARS = "scalars"
PIECE_BYTES = 16 << 20  # of a tensor that are copied to be hashed


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


def digest(state: State) -> Digested:
    """SHA-256 over names and raw bytes: of what is called `parameter/…`, and of everything."""
    parameters, everything = hashlib.sha256(), hashlib.sha256()
    shards = shards_of(state)
    for name in sorted(shards):
        counts = (everything, parameters) if name.startswith("parameter/") else (everything,)
        for each in counts:
            each.update(name.encode())
        for piece in _pieces(shards[name]):
            for each in counts:
                each.update(piece)
    return Digested(parameters.hexdigest(), everything.hexdigest())


def _pieces(tensor: torch.Tensor, most_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """A tensor's bytes in their logical order, in host memory, at most so many at a time; it may be on any device."""
    item, count = tensor.element_size(), tensor.numel()
    if count * item > most_bytes and not tensor.is_contiguous() and tensor.dim() > 1:
        rows = most_bytes * tensor.shape[0] // (count * item)
        for begin in range(0, tensor.shape[0], max(1, rows)):
            yield from _pieces(tensor[begin : begin + rows].contiguous() if rows else tensor[begin], most_bytes)
        return
    flat, step = tensor.reshape(-1), max(1, most_bytes // item)
    for begin in range(0, count, step):
        piece = flat[begin : begin + step].cpu()
        if piece.stride(0) != 1:  # `contiguous` leaves one element as it is
            piece = piece.clone(memory_format=torch.contiguous_format)
        yield piece.view(torch.uint8).numpy().data  # any dtype as bytes: numpy has no bfloat16, so the view is torch's
