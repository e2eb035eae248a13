"""What ranks do with a process group, for comparison between backends: `CASES[name](group)` returns tensors.

The values are small integers in every type, so that sums are exact whatever their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[Any], list[torch.Tensor]]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
LENGTHS = (0, 1, 7, 1001, 250_003)  # the last goes round a ring


def values(shape: Any, dtype: torch.dtype, who: int) -> torch.Tensor:
    drawn = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(who))
    return drawn.to(dtype) if dtype is not torch.bool else drawn > 1


def _cases() -> Iterator[tuple[str, Case]]:
    sum_, max_, min_, product = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX):
        for op in (sum_,) if dtype.is_complex else (sum_, max_, min_, product):
            for length in LENGTHS if op is sum_ else (7,):
                yield f"all_reduce {dtype} {op} {length}", _all_reduce(dtype, op, length)
        for length in (0, 5, 250_003):
            yield f"all_gather {dtype} {length}", _all_gather(dtype, length)
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool):
        yield f"broadcast {dtype}", _broadcast(dtype)
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for op in (sum_, max_):
            yield f"reduce {dtype} {op}", _reduce(dtype, op)
            yield f"reduce_scatter_tensor {dtype} {op}", _reduce_scatter_tensor(dtype, op)
        yield f"reduce_scatter {dtype}", _reduce_scatter(dtype)
        yield f"all_gather_into_tensor {dtype}", _all_gather_into_tensor(dtype)
        yield f"gather {dtype}", _gather(dtype)
        yield f"scatter {dtype}", _scatter(dtype)
        yield f"all_to_all_single {dtype}", _all_to_all_single(dtype)
        yield f"all_to_all_single with splits {dtype}", _all_to_all_splits(dtype)
        yield f"send and recv {dtype}", _send_and_recv(dtype)
    yield "all_reduce_coalesced", _all_reduce_coalesced
    yield "objects", _objects
    yield "asynchronous", _asynchronous
    yield "barrier", _barrier


def _all_reduce(dtype: torch.dtype, op: Any, length: int) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        tensor = values((length,), dtype, group.rank())
        dist.all_reduce(tensor, op, group=group)
        return [tensor]

    return run


def _all_gather(dtype: torch.dtype, length: int) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        parts = [torch.zeros(length, dtype=dtype) for _ in range(group.size())]
        dist.all_gather(parts, values((length,), dtype, group.rank()), group=group)
        return parts

    return run


def _broadcast(dtype: torch.dtype) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        got = []
        for root in range(group.size()):
            for shape in ((), (0,), (3, 2), (200_001,)):
                tensor = values(shape, dtype, 10 * root + group.rank())
                dist.broadcast(tensor, group=group, group_src=root)
                got.append(tensor)
        return got

    return run


def _reduce(dtype: torch.dtype, op: Any) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        got = []
        for root in range(group.size()):
            for length in (9, 200_001):
                tensor = values((length,), dtype, group.rank())
                dist.reduce(tensor, group_dst=root, op=op, group=group)
                got += [tensor] if group.rank() == root else []  # what the others hold is not defined
        return got

    return run


def _reduce_scatter_tensor(dtype: torch.dtype, op: Any) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        got = []
        for length in (3, 70_001):
            out = torch.zeros(length, dtype=dtype)
            dist.reduce_scatter_tensor(out, values((length * group.size(),), dtype, group.rank()), op, group=group)
            got.append(out)
        return got

    return run


def _reduce_scatter(dtype: torch.dtype) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        lengths = [5] * group.size()
        parts = [values((n,), dtype, 7 * r + group.rank()) for r, n in enumerate(lengths)]
        out = torch.zeros(lengths[group.rank()], dtype=dtype)
        dist.reduce_scatter(out, parts, group=group)
        return [out]

    return run


def _all_gather_into_tensor(dtype: torch.dtype) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        got = []
        for shape in ((0,), (2, 3), (70_001,)):
            out = torch.zeros((group.size() * shape[0], *shape[1:]), dtype=dtype)
            dist.all_gather_into_tensor(out, values(shape, dtype, group.rank()), group=group)
            got.append(out)
        return got

    return run


def _gather(dtype: torch.dtype) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        got = []
        for root in range(group.size()):
            parts = [torch.zeros(6, dtype=dtype) for _ in range(group.size())] if group.rank() == root else None
            dist.gather(values((6,), dtype, group.rank()), parts, group_dst=root, group=group)
            got += parts or []
        return got

    return run


def _scatter(dtype: torch.dtype) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        got = []
        for root in range(group.size()):
            parts = [values((6,), dtype, r + root) for r in range(group.size())] if group.rank() == root else None
            out = torch.zeros(6, dtype=dtype)
            dist.scatter(out, parts, group_src=root, group=group)
            got.append(out)
        return got

    return run


def _all_to_all_single(dtype: torch.dtype) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        rows = 4 * group.size()
        out = torch.zeros((rows, 3), dtype=dtype)
        dist.all_to_all_single(out, values((rows, 3), dtype, group.rank()), group=group)
        return [out]

    return run


def _all_to_all_splits(dtype: torch.dtype) -> Case:
    def run(group: Any) -> list[torch.Tensor]:
        me, size = group.rank(), group.size()
        sends, receives = [(me + r) % 3 for r in range(size)], [(me + r) % 3 for r in range(size)]
        out = torch.zeros((sum(receives), 2), dtype=dtype)
        dist.all_to_all_single(out, values((sum(sends), 2), dtype, me), receives, sends, group=group)
        return [out]

    return run


def _send_and_recv(dtype: torch.dtype) -> Case:
    """A ring, everyone sends first, tags out of order: nobody may have to wait for the other to begin."""

    def run(group: Any) -> list[torch.Tensor]:
        me, size = group.rank(), group.size()
        lengths = (0, 3, 150_001)
        sends = [
            dist.isend(values((n,), dtype, 10 * me + n), group_dst=(me + 1) % size, tag=n, group=group) for n in lengths
        ]
        got = [torch.zeros(n, dtype=dtype) for n in lengths]
        for tensor in reversed(got):
            dist.recv(tensor, group_src=(me - 1) % size, tag=tensor.numel(), group=group)
        for work in sends:
            work.wait()
        return got

    return run


def _all_reduce_coalesced(group: Any) -> list[torch.Tensor]:
    tensors = [values(shape, torch.float32, group.rank()) for shape in ((3,), (2, 2), (), (0,), (100_001,))]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def _objects(group: Any) -> list[torch.Tensor]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, {"rank": group.rank(), "text": "x" * 1000 * group.rank()}, group=group)
    told = [("from", group.rank())]
    dist.broadcast_object_list(told, group=group, group_src=1)
    return [torch.tensor([each["rank"], len(each["text"])]) for each in gathered] + [torch.tensor(told[0][1])]


def _asynchronous(group: Any) -> list[torch.Tensor]:
    tensors = [values((50,), torch.float32, 100 * i + group.rank()) for i in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    doubled = [work.get_future().then(lambda f: 2 * f.value()[0]) for work in works[:5]]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return tensors + [future.wait() for future in doubled]


def _barrier(group: Any) -> list[torch.Tensor]:
    dist.barrier(group=group)
    return []


CASES: dict[str, Case] = dict(_cases())
