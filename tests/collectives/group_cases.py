"""What ranks do with a process group, for comparison between backends: `CASES[name].run(group, lay, dtype)` returns tensors.

The values are small integers in every type, so that sums are exact whatever their order, and what a backend does not take
in one type can be compared with what it gives in another. `lay` makes every tensor that is given to the group: as it
is, or the same elements in strided memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Lay = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[[Any, Lay, torch.dtype], list[torch.Tensor]]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
ALL = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)
LONG = (torch.float32, torch.bfloat16, torch.int64)  # types whose messages are long, too
OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "xor": dist.ReduceOp.BXOR,
}


@dataclass(frozen=True)
class Case:
    run: Run
    dtype: torch.dtype
    strided: bool = False

    @property
    def wide(self) -> torch.dtype:
        """A type with the same elements that every backend takes."""
        if self.dtype.is_complex or self.dtype.is_floating_point:
            return torch.float64
        return torch.uint8 if self.dtype is torch.bool else torch.int64


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with others between them, and dimensions in another order."""
    wide = torch.zeros((*reversed(tensor.shape), 2), dtype=tensor.dtype, device=tensor.device)
    strided = wide[..., 0].permute(list(reversed(range(tensor.dim()))))
    return strided.copy_(tensor)


def values(shape: Any, dtype: torch.dtype, who: int) -> torch.Tensor:
    most = 1 if dtype in (torch.bool, torch.uint8) else 3
    return of_type(torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(who)), dtype)


def of_type(real: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As elements of that type; complex ones have an imaginary part, too, which sums keep in proportion."""
    return real.to(dtype) * (1 + 2j) if dtype.is_complex else real.to(dtype)


def _cases() -> Iterator[tuple[str, Case]]:
    for dtype in ALL:
        lengths = (0, 1, 7, 1001, 250_003) if dtype in LONG else (0, 7)  # the last goes round a ring
        for op, asked in OPS.items():
            if (dtype.is_complex and op != "sum") or dtype is torch.bool:
                continue
            if op in ("and", "or", "xor") and dtype.is_floating_point:
                continue
            for length in lengths if op == "sum" else (7,):
                yield f"all_reduce {op} {length}", Case(_all_reduce(asked, length), dtype)
            if dtype.is_complex:
                continue
            yield f"reduce {op}", Case(_reduce(asked, (9, 200_001) if dtype in LONG else (9,)), dtype)
            yield f"reduce_scatter {op}", Case(_reduce_scatter(asked), dtype)
            blocks = (3, 70_001) if dtype in LONG else (3,)
            yield f"reduce_scatter_tensor {op}", Case(_reduce_scatter_tensor(asked, blocks), dtype)
        for length in (0, 5, 250_003) if dtype in LONG else (0, 5):
            yield f"all_gather {length}", Case(_all_gather(length), dtype)
        moved = {
            "broadcast": _broadcast(((), (0,), (3, 2), (200_001,)) if dtype in LONG else ((), (3, 2))),
            "all_gather_into_tensor": _all_gather_into_tensor(((0,), (2, 3), (70_001,)) if dtype in LONG else ((2, 3),)),
            "gather": _gather,
            "scatter": _scatter,
            "all_to_all_single": _all_to_all_single,
            "all_to_all_single with splits": _all_to_all_splits,
            "send and recv": _send_and_recv((0, 3, 150_001) if dtype in LONG else (0, 3)),
        }
        for name, run in moved.items():
            yield name, Case(run, dtype)
            if dtype in (torch.float32, torch.complex64):
                yield f"{name}, strided", Case(run, dtype, strided=True)
    sum_, f32 = dist.ReduceOp.SUM, torch.float32
    for length in (0, 7, 250_003):
        yield f"all_reduce {length}, strided", Case(_all_reduce(sum_, length), f32, strided=True)
        yield f"all_gather {length}, strided", Case(_all_gather(length), f32, strided=True)
    yield "reduce, strided", Case(_reduce(sum_, (9, 200_001)), f32, strided=True)
    yield "reduce_scatter, strided", Case(_reduce_scatter(sum_), f32, strided=True)
    yield "reduce_scatter_tensor, strided", Case(_reduce_scatter_tensor(sum_, (3, 70_001)), f32, strided=True)
    for strided in (False, True):
        yield f"all_reduce_coalesced {strided}", Case(_all_reduce_coalesced, f32, strided)
    yield "objects", Case(_objects, f32)
    yield "asynchronous", Case(_asynchronous, f32)
    yield "barrier", Case(_barrier, f32)


def _all_reduce(op: Any, length: int) -> Run:
    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        tensor = lay(values((length,), dtype, group.rank()))
        dist.all_reduce(tensor, op, group=group)
        return [tensor]

    return run


def _all_gather(length: int) -> Run:
    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [lay(torch.zeros(length, dtype=dtype)) for _ in range(group.size())]
        dist.all_gather(parts, lay(values((length,), dtype, group.rank())), group=group)
        return parts

    return run


def _broadcast(shapes: Any) -> Run:
    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        got = []
        for root in range(group.size()):
            for shape in shapes:
                tensor = lay(values(shape, dtype, 10 * root + group.rank()))
                dist.broadcast(tensor, group=group, group_src=root)
                got.append(tensor)
        return got

    return run


def _reduce(op: Any, lengths: Any) -> Run:
    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        got = []
        for root in range(group.size()):
            for length in lengths:
                tensor = lay(values((length,), dtype, group.rank()))
                dist.reduce(tensor, group_dst=root, op=op, group=group)
                got += [tensor] if group.rank() == root else []  # what the others hold is not defined
        return got

    return run


def _reduce_scatter_tensor(op: Any, lengths: Any) -> Run:
    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        got = []
        for length in lengths:
            out = lay(torch.zeros(length, dtype=dtype))
            dist.reduce_scatter_tensor(out, lay(values((length * group.size(),), dtype, group.rank())), op, group=group)
            got.append(out)
        return got

    return run


def _reduce_scatter(op: Any) -> Run:
    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [lay(values((5,), dtype, 7 * r + group.rank())) for r in range(group.size())]
        out = lay(torch.zeros(5, dtype=dtype))
        dist.reduce_scatter(out, parts, op, group=group)
        return [out]

    return run


def _all_gather_into_tensor(shapes: Any) -> Run:
    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        got = []
        for shape in shapes:
            out = lay(torch.zeros((group.size() * shape[0], *shape[1:]), dtype=dtype))
            dist.all_gather_into_tensor(out, lay(values(shape, dtype, group.rank())), group=group)
            got.append(out)
        return got

    return run


def _gather(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    got = []
    for root in range(group.size()):
        parts = [lay(torch.zeros(6, dtype=dtype)) for _ in range(group.size())] if group.rank() == root else None
        dist.gather(lay(values((6,), dtype, group.rank())), parts, group_dst=root, group=group)
        got += parts or []
    return got


def _scatter(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    got = []
    for root in range(group.size()):
        parts = [lay(values((6,), dtype, r + root)) for r in range(group.size())] if group.rank() == root else None
        out = lay(torch.zeros(6, dtype=dtype))
        dist.scatter(out, parts, group_src=root, group=group)
        got.append(out)
    return got


def _all_to_all_single(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = 4 * group.size()
    out = lay(torch.zeros((rows, 3), dtype=dtype))
    dist.all_to_all_single(out, lay(values((rows, 3), dtype, group.rank())), group=group)
    return [out]


def _all_to_all_splits(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    me, size = group.rank(), group.size()
    sends, receives = [(me + r) % 3 for r in range(size)], [(me + r) % 3 for r in range(size)]
    out = lay(torch.zeros((sum(receives), 2), dtype=dtype))
    dist.all_to_all_single(out, lay(values((sum(sends), 2), dtype, me)), receives, sends, group=group)
    return [out]


def _send_and_recv(lengths: Any) -> Run:
    """A ring, everyone sends first, tags out of order: nobody may have to wait for the other to begin."""

    def run(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
        me, size = group.rank(), group.size()
        sends = [
            dist.isend(lay(values((n,), dtype, 10 * me + n)), group_dst=(me + 1) % size, tag=n, group=group) for n in lengths
        ]
        got = [lay(torch.zeros(n, dtype=dtype)) for n in lengths]
        for tensor in reversed(got):
            dist.recv(tensor, group_src=(me - 1) % size, tag=tensor.numel(), group=group)
        for work in sends:
            work.wait()
        return got

    return run


def _all_reduce_coalesced(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = [lay(values(shape, dtype, group.rank())) for shape in ((3,), (2, 2), (), (0,), (100_001,))]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def _objects(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, {"rank": group.rank(), "text": "x" * 1000 * group.rank()}, group=group)
    told = [("from", group.rank())]
    dist.broadcast_object_list(told, group=group, group_src=1)
    return [torch.tensor([each["rank"], len(each["text"])]) for each in gathered] + [torch.tensor(told[0][1])]


def _asynchronous(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = [values((50,), dtype, 100 * i + group.rank()) for i in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    doubled = [work.get_future().then(lambda f: 2 * f.value()[0]) for work in works[:5]]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return tensors + [future.wait() for future in doubled]


def _barrier(group: Any, lay: Lay, dtype: torch.dtype) -> list[torch.Tensor]:
    dist.barrier(group=group)
    return []


CASES: dict[str, Case] = {f"{name} {case.dtype}": case for name, case in _cases()}
