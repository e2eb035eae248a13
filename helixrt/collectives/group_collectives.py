"""The collectives of `torch.distributed` on a communicator, in place, as c10d's callers expect them.

In: tensors of any strides, and c10d's option objects. Out: works. A mixin: `process_group` joins it
with torch's class, `torchft_group` with torchft's. C++ callers (functional collectives, DDP's reducer) reach
`allreduce`, `allreduce_coalesced`, `broadcast`, `barrier`, `allgather`, `reduce_scatter`, the `_single_coalesced` ones,
`all_to_all_single`, `send` and `recv`; Python callers all of them, also by their older names.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helixrt.collectives.handle import Handle
from helixrt.collectives.operations import Collectives, How
from helixrt.collectives.reduction import Op, Reduction, why_not
from helixrt.collectives.stand_ins import Back, apart, in_place_or_apart, readable, several, writable
from helixrt.collectives.work import GroupError, HelixWork

Tensors = list[torch.Tensor]

_OPS = (
    (dist.ReduceOp.SUM, Op.SUM),
    (dist.ReduceOp.AVG, Op.SUM),
    (dist.ReduceOp.MAX, Op.MAX),
    (dist.ReduceOp.MIN, Op.MIN),
    (dist.ReduceOp.PRODUCT, Op.PRODUCT),
    (dist.ReduceOp.BAND, Op.AND),
    (dist.ReduceOp.BOR, Op.OR),
    (dist.ReduceOp.BXOR, Op.XOR),
)


def _elements(tensor: torch.Tensor) -> int:
    """As counted in flat memory, where complex numbers are pairs."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _one(tensors: Tensors | torch.Tensor) -> torch.Tensor:
    """c10d passes one tensor in a list: several meant several devices of one process, once."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"one tensor per rank, not {len(tensors)}")
    return tensors[0]


def _check(tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str, counts: bool = True) -> None:
    for tensor in tensors:
        if tensor.dtype != like.dtype or tensor.device != like.device or tensor.is_sparse or tensor.is_quantized:
            told = f"{tensor.dtype} on {tensor.device} with {like.dtype} on {like.device}"
            raise ValueError(f"{what}: dense tensors of one type and device are needed, not {told}")
        if counts and tensor.numel() != like.numel():
            raise ValueError(f"{what}: all tensors need {like.numel()} elements, one has {tensor.numel()}")


class GroupCollectives:
    """Needs `_collectives` and `_timeout_s`."""

    _collectives: Collectives | None
    _timeout_s: float

    # ---------------------------------------------------------------- reductions

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        tensor = _one(tensors)
        memory, back = writable(tensor, keep=True)
        calls, reduction = self._calls(), self._reduction(opts, tensor)
        return self._work([calls.all_reduce(memory, memory, reduction, self._how(opts, back, timeout))], [tensor], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        calls, handles = self._calls(), []
        by_type: dict[tuple[torch.dtype, torch.device], Tensors] = {}
        for tensor in tensors:
            by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in by_type.values():
            reduction = self._reduction(opts, alike[0])
            memory, back = several(alike, keep=True)
            handles.append(calls.all_reduce(memory, memory, reduction, self._how(opts, back, waits=False)))
        return self._work(handles, list(tensors), opts)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor, calls = _one(tensors), self._calls()
        reduction = self._reduction(opts, tensor)
        memory, back = writable(tensor, keep=True)
        if calls.communicator.rank != opts.rootRank:
            back = None
        handle = calls.reduce(memory, memory, opts.rootRank, reduction, self._how(opts, back))
        return self._work([handle], [tensor], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        output, parts = _one(outputs), inputs[0]
        self._one_for_each_rank(parts, "reduce_scatter")
        _check(parts, output, "reduce_scatter", counts=False)
        return self._work([self._reduce_scatter(output, parts, opts)], [output], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._work([self._reduce_scatter_single(output, input, opts)], [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._reduce_scatter_single(o, i, opts, waits=False) for o, i in pairs], list(outputs), opts)

    def _reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any, waits: bool = True) -> Handle:
        size = self._calls().communicator.size
        if input.numel() != size * output.numel() or input.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter: the input needs {size} times the output's {output.numel()} elements of {output.dtype}, "
                f"it has {input.numel()} of {input.dtype}"
            )
        return self._reduce_scatter(output, [input], opts, [_elements(output)] * size, waits)

    def _reduce_scatter(
        self, output: torch.Tensor, parts: Tensors, opts: Any, counts: list[int] | None = None, waits: bool = True
    ) -> Handle:
        calls, reduction = self._calls(), self._reduction(opts, output)
        counts = counts or [_elements(part) for part in parts]
        if counts[calls.communicator.rank] != _elements(output):
            raise ValueError(f"reduce_scatter: this rank's part has another size than the output's {output.numel()}")
        source = readable(parts[0]) if len(parts) == 1 else torch.cat([readable(part) for part in parts])
        memory, back = writable(output, keep=False)
        source = in_place_or_apart(source, memory, self._offset(counts, memory))
        return calls.reduce_scatter(source, memory, counts, reduction, self._how(opts, back, waits=waits))

    # ---------------------------------------------------------------- gathers

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        parts = outputs[0]
        return self._work([self._all_gather(parts, _one(inputs), opts)], list(parts), opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        handles = [self._all_gather(parts, each, opts, waits=False) for parts, each in zip(outputs, inputs, strict=True)]
        return self._work(handles, [part for parts in outputs for part in parts], opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._work([self._all_gather_single(output, input, opts)], [output], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._all_gather_single(o, i, opts, waits=False) for o, i in pairs], list(outputs), opts)

    def _all_gather(self, parts: Tensors, input: torch.Tensor, opts: Any, waits: bool = True) -> Handle:
        self._one_for_each_rank(parts, "all_gather")
        _check(parts, input, "all_gather", counts=False)
        counts = [_elements(part) for part in parts]
        if counts[self._calls().communicator.rank] != _elements(input):
            raise ValueError(f"all_gather: the output for this rank has another size than its {input.numel()} elements")
        memory, back = several(parts, keep=False)
        source = in_place_or_apart(readable(input), memory, self._offset(counts, memory))
        return self._calls().all_gather(source, memory, counts, self._how(opts, back, waits=waits))

    def _all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any, waits: bool = True) -> Handle:
        calls = self._calls()
        size = calls.communicator.size
        if output.numel() != size * input.numel() or input.dtype != output.dtype:
            raise ValueError(
                f"all_gather: the output needs {size} times the input's {input.numel()} elements of {input.dtype}, "
                f"it has {output.numel()} of {output.dtype}"
            )
        memory, back = writable(output, keep=False)
        counts = [_elements(input)] * size
        source = in_place_or_apart(readable(input), memory, self._offset(counts, memory))
        return calls.all_gather(source, memory, counts, self._how(opts, back, waits=waits))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        calls, tensor = self._calls(), _one(inputs)
        root, parts = opts.rootRank, []
        source = readable(tensor)
        memory, back = source[:0], None
        counts = [source.numel()] * calls.communicator.size
        if calls.communicator.rank == root:
            parts = outputs[0]
            self._one_for_each_rank(parts, "gather")
            _check(parts, tensor, "gather")
            memory, back = several(parts, keep=False)
            source = in_place_or_apart(source, memory, self._offset(counts, memory))
        return self._work([calls.gather(source, memory, root, counts, self._how(opts, back))], list(parts), opts)

    # ---------------------------------------------------------------- from one to all

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        tensor, calls = _one(tensors), self._calls()
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0
        memory, back = writable(tensor, keep=True)
        if calls.communicator.rank == root:
            back = None
        return self._work([calls.broadcast(memory, root, self._how(opts, back, timeout))], [tensor], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        calls, output = self._calls(), _one(outputs)
        memory, back = writable(output, keep=False)
        source = memory[:0]
        if calls.communicator.rank == opts.rootRank:
            self._one_for_each_rank(inputs[0], "scatter")
            _check(inputs[0], output, "scatter")
            source = torch.cat([readable(part) for part in inputs[0]])
        counts = [memory.numel()] * calls.communicator.size
        handle = calls.scatter(source, memory, opts.rootRank, counts, self._how(opts, back))
        return self._work([handle], [output], opts)

    # ---------------------------------------------------------------- all to all

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        calls = self._calls()
        _check([output], input, "all_to_all", counts=False)
        sends, receives = self._splits(input, input_splits), self._splits(output, output_splits)
        memory, back = writable(output, keep=False)
        source = readable(input)
        handle = calls.all_to_all(apart(source, memory), memory, sends, receives, self._how(opts, back))
        return self._work([handle], [output], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        calls = self._calls()
        for tensors in (outputs, inputs):
            self._one_for_each_rank(tensors, "all_to_all")
            _check(tensors, inputs[0], "all_to_all", counts=False)
        source = torch.cat([readable(part) for part in inputs])
        memory, back = several(outputs, keep=False)
        sends, receives = [_elements(part) for part in inputs], [_elements(part) for part in outputs]
        handle = calls.all_to_all(apart(source, memory), memory, sends, receives, self._how(opts, back))
        return self._work([handle], list(outputs), opts)

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        """In elements; given are rows of the first dimension, equal ones if nothing is given."""
        size, rows = self._calls().communicator.size, tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise ValueError(f"all_to_all: {rows} rows cannot be split equally over {size} ranks")
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(f"all_to_all: splits {list(splits)} must be {size} numbers with the sum {rows}")
        row = _elements(tensor) // rows if rows else 0
        return [split * row for split in splits]

    # ---------------------------------------------------------------- others

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        return self._work([self._calls().barrier(self._how(opts, None, timeout))], [], opts)

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> dist.Work:
        tensor = _one(tensors)
        peer = self._peer(dst_rank)
        return self._work([self._calls().send(readable(tensor), peer, tag, self._how(None, None))], [tensor], None)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> dist.Work:
        tensor = _one(tensors)
        memory, back = writable(tensor, keep=False)
        peer = self._peer(src_rank)
        return self._work([self._calls().receive(memory, peer, tag, self._how(None, back))], [tensor], None)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        raise NotImplementedError("the backend 'helix' receives from a rank that is named; give `src`")

    # ---------------------------------------------------------------- older names

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---------------------------------------------------------------- how a call runs

    def _calls(self) -> Collectives:
        if self._collectives is None:
            raise GroupError("process group not initialized: it was not configured, or was shut down")
        return self._collectives

    def _how(self, opts: Any, back: Back | None, timeout: timedelta | None = None, waits: bool = True) -> How:
        given = timeout or getattr(opts, "timeout", None)
        timeout_s = given.total_seconds() if given is not None else -1.0
        # c10d sets `asyncOp` if it does not wait at once; callers that do not set it may not wait.
        waits = waits and not getattr(opts, "asyncOp", True)
        return How(timeout_s if timeout_s > 0 else self._timeout_s, back, waits)

    def _work(self, handles: list[Handle], tensors: Tensors, opts: Any) -> dist.Work:
        return HelixWork(handles, tensors, self._how(opts, None).timeout_s)

    def _reduction(self, opts: Any, like: torch.Tensor) -> Reduction:
        """What c10d's ReduceOp, or the options with it, ask for."""
        asked = getattr(opts, "reduceOp", opts) if opts is not None else dist.ReduceOp.SUM
        op = next((ours for theirs, ours in _OPS if asked == theirs), None)
        mean = asked == dist.ReduceOp.AVG
        reason = f"{asked} is not supported" if op is None else why_not(op, like.dtype, mean)
        if like.is_sparse or like.is_quantized:
            reason = "sparse and quantized tensors are not supported"
        if reason or op is None:
            raise ValueError(f"the backend 'helix': {reason}")
        return Reduction(op, self._calls().communicator.size if mean else 1)

    def _offset(self, counts: Sequence[int], like: torch.Tensor) -> int:
        """Where this rank's part begins in memory that holds `counts[r]` elements for every rank, in bytes."""
        return sum(counts[: self._calls().communicator.rank]) * like.element_size()

    def _peer(self, rank: int) -> int:
        communicator = self._calls().communicator
        if not 0 <= rank < communicator.size or rank == communicator.rank:
            raise ValueError(f"rank {rank} is no other rank of this group of {communicator.size}")
        return rank

    def _one_for_each_rank(self, tensors: Tensors, what: str) -> None:
        size = self._calls().communicator.size
        if len(tensors) != size:
            raise ValueError(f"{what}: needs a tensor for each of {size} ranks, not {len(tensors)}")
