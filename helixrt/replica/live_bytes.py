"""Bytes that a rank's gradient and state sets occupy, by kind and by device, each memory counted once.

In: tensors. Out: bytes by device type. On an accelerator at most two gradient-sized sets live: the local one, of which
`p.grad` is a view, and the sums of the exchange (DESIGN.md, "Gradients"); what is kept, served or offered lives in host
memory, within `catchup.memory_gb`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

LOCAL, SUMS, KEPT, SERVED, SNAPSHOTS = "local", "sums", "kept", "served", "snapshots"

LiveBytes = dict[str, dict[str, int]]  # kind -> device type -> bytes


def bytes_of(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """By device type; tensors that share their memory count once."""
    storages = {id(storage): (tensor.device.type, storage) for tensor in tensors for storage in [tensor.untyped_storage()]}
    found: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()
    for device, storage in storages.values():
        key = (device, storage.data_ptr() or id(storage))  # a storage without memory has no address
        if key not in seen:
            seen.add(key)
            found[device] += storage.nbytes()
    return dict(found)


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised host memory for a copy of the tensor, pinned where it is on a CUDA device."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def queued_copy(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory and contiguous; of a tensor on a CUDA device it is made when the current stream comes to it."""
    if not tensor.is_cuda:
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    tensor.record_stream(torch.cuda.current_stream(tensor.device))  # also if it is freed before
    return copy.copy_(tensor.detach(), non_blocking=True)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory, whatever happens to the tensor afterwards."""
    return tensor.detach().to("cpu", copy=True)
