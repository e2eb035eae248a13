"""What c10d's callers give, as flat contiguous host memory: their own where it is that already, else a copy.

In: tensors of any strides, of any device. Out: flat tensors, and what puts results back where they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from helixrt.collectives.memory import flat

Back = Callable[[], None]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor`, in row-major order; not to be written."""
    given = tensor.detach()
    if given.is_conj() or given.is_neg():
        given = given.resolve_conj().resolve_neg()
    return flat((given if given.device.type == "cpu" else given.cpu()).contiguous())


def writable(tensor: torch.Tensor, keep: bool) -> tuple[torch.Tensor, Back | None]:
    """Memory that stands for `tensor`, with its present elements if `keep`; the second puts them back, if need be."""
    given = tensor.detach()
    if given.is_contiguous() and given.device.type == "cpu" and not given.is_conj() and not given.is_neg():
        return flat(given), None
    stand_in = torch.empty(given.shape, dtype=given.dtype, pin_memory=given.device.type == "cuda")
    if keep:
        stand_in.copy_(given)
    return flat(stand_in), lambda: _put(given, stand_in)


def several(tensors: Sequence[torch.Tensor], keep: bool) -> tuple[torch.Tensor, Back | None]:
    """As `writable`, for tensors of one type that lie one behind the other."""
    if len(tensors) == 1:
        return writable(tensors[0], keep)
    given = [tensor.detach() for tensor in tensors]
    if keep:
        stand_in = torch.cat([readable(tensor) for tensor in given])
    else:
        stand_in = flat(torch.empty(sum(tensor.numel() for tensor in given), dtype=given[0].dtype))

    def back() -> None:
        at = 0
        for tensor in given:
            count = tensor.numel() * (2 if tensor.is_complex() else 1)
            part = stand_in.narrow(0, at, count)
            whole = torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part
            _put(tensor, whole.view(tensor.shape))
            at += count

    return stand_in, back


def _put(tensor: torch.Tensor, elements: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(elements)
