"""What collectives call to reduce and to copy: torch for CPU tensors, the Triton kernels for CUDA tensors.

In: contiguous tensors of one length, type and device. Out: the result in one or two destinations; two are the fused last
step of FTAR's reduce-scatter, which fills the user's buffer and the send buffer at once (FT-HSDP section 4.2).
`oracle.reduced` defines the bits of the result, on every device.

On the CPU the work is done by the caller's thread and its intra-op threads, without the interpreter lock while torch
works; a second destination is a copy of the first. On CUDA the kernel reads once and stores twice; it is queued on the
current stream for a set number of programs (`kernels`), and nothing waits. Pinned host memory may then stand beside
tensors of the card: the kernel reads and writes it through the bus.
"""

from __future__ import annotations

import threading
from types import ModuleType

import torch

from helixrt.errors import MissingExtra
from helixrt.triton_kernels.oracle import ACCUMULATORS, BITWISE, OPERATORS, Op

__all__ = ["PROGRAMS", "Op", "copy", "reduce_copy"]

PROGRAMS = 2  # thread blocks, as in the paper

_WIDE_BLOCK = 1 << 15  # elements; their float32 form stays in a core's cache

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
            _flat(out).copy_(_flat(source))
            if also is not None:
                _flat(also).copy_(_flat(source))
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
    if all([each.is_cpu for each in tensors]):
        return None
    cards = list({each.device for each in tensors if each.is_cuda})
    if len(cards) != 1 or not all(each.is_cuda or (each.is_cpu and each.is_pinned()) for each in tensors):
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
    if divisor != 1 and ACCUMULATORS[left.dtype] != left.dtype:
        _mean_of_halves(left, right, out, divisor)
    else:
        OPERATORS[op](left, right, out=out)
        if divisor != 1:
            out.div_(divisor)
    if also is not None:
        also.copy_(out)


def _mean_of_halves(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, divisor: int) -> None:
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
