"""What c10d's callers give, as flat contiguous memory: their own where it is that already, else a copy on its device.

In: tensors of any strides. Out: flat tensors, and what puts results back where they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from helixrt.collectives.memory import flat, lies_at, overlap

Back = Callable[[], None]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor`, in row-major order; not to be written."""
    given = tensor.detach()
    if given.is_conj() or given.is_neg():
        given = given.resolve_conj().resolve_neg()
    return flat(given.contiguous())


def writable(tensor: torch.Tensor, keep: bool) -> tuple[torch.Tensor, Back | None]:
    """Memory that stands for `tensor`, with its present elements if `keep`; the second puts them back, if need be."""
    given = tensor.detach()
    if given.is_contiguous() and not given.is_conj() and not given.is_neg():
        return flat(given), None
    stand_in = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    if keep:
        stand_in.copy_(given)
    return flat(stand_in), _Back([(given, stand_in)])


def several(tensors: Sequence[torch.Tensor], keep: bool) -> tuple[torch.Tensor, Back | None]:
    """As `writable`, for tensors of one type and device that lie one behind the other."""
    if len(tensors) == 1:
        return writable(tensors[0], keep)
    given = [tensor.detach() for tensor in tensors]
    if keep:
        stand_in = torch.cat([readable(tensor) for tensor in given])
    else:
        total = sum(tensor.numel() for tensor in given)
        stand_in = flat(torch.empty(total, dtype=given[0].dtype, device=given[0].device))
    pairs, at = [], 0
    for tensor in given:
        count = tensor.numel() * (2 if tensor.is_complex() else 1)
        part = stand_in.narrow(0, at, count)
        pairs.append((tensor, (torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part).view(tensor.shape)))
        at += count
    return stand_in, _Back(pairs)


def apart(source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`source`, or a copy where it shares memory with `out`."""
    return source.clone() if overlap(source, out) else source


def in_place_or_apart(source: torch.Tensor, out: torch.Tensor, offset: int) -> torch.Tensor:
    """`source`; a copy where it shares memory with `out`, unless the shorter begins at `offset` bytes of the longer: what
    FSDP does, which gathers from a part of the output."""
    part, whole = (source, out) if source.numel() <= out.numel() else (out, source)
    return source if lies_at(part, whole, offset) else apart(source, out)


class _Back:
    """Puts elements back; the tensors that it writes may be on a card."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs

    def __call__(self) -> None:
        with torch.no_grad():
            for tensor, elements in self._pairs:
                if tensor.is_cuda:  # it may be a side stream that works on it here
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
                tensor.copy_(elements, non_blocking=True)
