"""What collectives call to reduce and to copy: torch for CPU tensors, the Triton kernels for CUDA tensors.

In: contiguous tensors of one length, type and device. Out: the result in one or two destinations in one pass over the
inputs; two are the fused last step of FTAR's reduce-scatter, which fills the user's buffer and the send buffer at once
(FT-HSDP section 4.2). `oracle.reduced` says which bits come out, on every device.

On the CPU the work is done by the caller's thread and its intra-op threads, without the interpreter lock while torch
works. On CUDA it is queued on the current stream by a set number of programs (`kernels`); nothing waits. Pinned host
memory may then stand beside tensors of the card: the kernel reads and writes it through the bus.
"""

from __future__ import annotations

import threading
from types import ModuleType

import torch

from helixrt.errors import MissingExtra
from helixrt.triton_kernels.oracle import ACCUMULATORS, BITWISE, OPERATORS, Op

__all__ = ["PROGRAMS", "Op", "copy", "reduce_copy"]

PROGRAMS = 2  # thread blocks, as in the paper

# What is read again (a quotient, a second destination) is still in the cache after so many bytes of it.
_BLOCK_BYTES = 1 << 18
_WIDE_BLOCK = 1 << 15  # elements

_own = threading.local()


def reduce_copy(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    also: torch.Tensor | None = None,
    *,
    op: Op = Op.SUM,
    divisor: int = 1,
    programs: int = PROGRAMS,
) -> None:
    """`out` (and `also`) = (`left` op `right`) / `divisor`, in the accumulator type of the elements, rounded once.

    Any equal shapes; float64, float32, float16, bfloat16, integers up to 64 bits, uint8 and bool. `out` or `also` may
    be `left` or `right` itself; any other overlap of a destination is refused. A divisor needs SUM and floating-point
    elements. Raises ValueError for what does not fit together, MissingExtra for CUDA tensors without Triton.
    """
    _check(left, (right,), (out,) if also is None else (out, also))
    if left.dtype not in ACCUMULATORS:
        raise ValueError(f"cannot reduce {left.dtype}; give one of {', '.join(str(d) for d in ACCUMULATORS)}")
    if divisor != 1 and (op is not Op.SUM or not left.dtype.is_floating_point or divisor < 1):
        raise ValueError(f"cannot divide {op.value} of {left.dtype} by {divisor}: a mean is a sum of floats over 1 or more")
    if op in BITWISE and left.dtype.is_floating_point:
        raise ValueError(f"cannot reduce {left.dtype} by {op.value}: it needs integers or bool")
    if left.numel() == 0:
        return
    flat = [_flat(each) for each in (left, right, out)]
    flat_also = None if also is None else _flat(also)
    if (card := _card(left, right, out, also)) is None:
        with torch.no_grad():
            _reduce_on_host(flat[0], flat[1], flat[2], flat_also, op, divisor)
        return
    kernels = _kernels()
    with torch.cuda.device(card):
        kernels.launch_reduce_copy(*flat, flat_also, op, divisor, kernels.Launch(programs))


def copy(source: torch.Tensor, out: torch.Tensor, also: torch.Tensor | None = None, *, programs: int = PROGRAMS) -> None:
    """`out` (and `also`) = `source`, bit by bit, for every type; otherwise as `reduce_copy`."""
    _check(source, (), (out,) if also is None else (out, also))
    if source.numel() == 0:
        return
    if (card := _card(source, out, also)) is None:
        with torch.no_grad():
            _copy_on_host(_flat(source), _flat(out), None if also is None else _flat(also))
        return
    kernels = _kernels()
    with torch.cuda.device(card):
        kernels.launch_copy(_flat(source), _flat(out), None if also is None else _flat(also), kernels.Launch(programs))


# ---------------------------------------------------------------- what may stand together


def _check(first: torch.Tensor, others: tuple[torch.Tensor, ...], into: tuple[torch.Tensor, ...]) -> None:
    length, dtype = first.numel(), first.dtype
    fits = first.is_contiguous()
    for each in (*others, *into):
        fits = fits and each.numel() == length and each.dtype is dtype and each.is_contiguous()
    if not fits:
        raise ValueError(f"tensors must be contiguous and of one length and type, got {_told(first, *others, *into)}")
    nbytes = length * first.element_size()
    sources = [each.data_ptr() for each in (first, *others)]
    written: list[int] = []
    for each in into:
        begin = each.data_ptr()
        # The same memory is safe: every element is read before it is written. Shifted memory is not.
        if any(0 < abs(begin - at) < nbytes for at in sources) or any(abs(begin - at) < nbytes for at in written):
            raise ValueError(f"a destination overlaps another tensor without being the same: {_told(first, *others, *into)}")
        written.append(begin)


def _card(*given: torch.Tensor | None) -> torch.device | None:
    """The CUDA device of the tensors; None when they lie in host memory, pinned or not."""
    tensors = [each for each in given if each is not None]
    devices = {each.device for each in tensors}
    cards = [device for device in devices if device.type == "cuda"]
    if not cards and len(devices) == 1 and tensors[0].device.type == "cpu":
        return None
    strangers = [each for each in tensors if not (each.is_cuda or each.device.type == "cpu" and each.is_pinned())]
    if len(cards) != 1 or strangers:
        raise ValueError(f"tensors must be on one device, or on one card and in pinned memory, got {_told(*tensors)}")
    return cards[0]


def _told(*tensors: torch.Tensor) -> str:
    return ", ".join(
        f"{each.dtype}{list(each.shape)} on {each.device} at {each.data_ptr():#x}"
        + ("" if each.is_contiguous() else " (not contiguous)")
        for each in tensors
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _kernels() -> ModuleType:
    try:
        from helixrt.triton_kernels import kernels
    except ImportError as error:
        raise MissingExtra("triton", "gpu", "a reduction of CUDA tensors") from error
    return kernels


# ---------------------------------------------------------------- on the host


def _reduce_on_host(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, also: torch.Tensor | None, op: Op, divisor: int
) -> None:
    operate = OPERATORS[op]
    if divisor != 1 and ACCUMULATORS[left.dtype] != left.dtype:
        _mean_of_halves(left, right, out, also, divisor)
        return
    if also is None and divisor == 1:
        operate(left, right, out=out)
        return
    block = _BLOCK_BYTES // left.element_size()
    more = (None,) * -(-out.numel() // block) if also is None else also.split(block)
    for a, b, o, second in zip(left.split(block), right.split(block), out.split(block), more, strict=True):
        operate(a, b, out=o)
        if divisor != 1:
            o.div_(divisor)
        if second is not None:
            second.copy_(o)


def _mean_of_halves(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, also: torch.Tensor | None, divisor: int
) -> None:
    """16-bit elements are summed and divided in float32, in a block that the thread keeps."""
    wide = getattr(_own, "wide", None)
    if wide is None:
        wide = _own.wide = torch.empty(_WIDE_BLOCK, dtype=torch.float32)
    for begin in range(0, left.numel(), _WIDE_BLOCK):
        end = min(begin + _WIDE_BLOCK, left.numel())
        result = wide[: end - begin]
        result.copy_(left[begin:end])
        result.add_(right[begin:end]).div_(divisor)
        out[begin:end].copy_(result)
        if also is not None:
            also[begin:end].copy_(result)


def _copy_on_host(source: torch.Tensor, out: torch.Tensor, also: torch.Tensor | None) -> None:
    if also is None:
        out.copy_(source)
        return
    block = max(1, _BLOCK_BYTES // source.element_size())
    for a, o, second in zip(source.split(block), out.split(block), also.split(block), strict=True):
        o.copy_(a)
        second.copy_(a)
