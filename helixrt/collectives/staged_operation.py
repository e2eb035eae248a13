"""A staged call as an operation of a communicator: what it sends waits until it has come, what it sums is summed on the card.

In: a plan, and the caller's tensors on a card. Out: host tensors to run the plan on; for every action of the machine
whether it may be carried out yet; and the copy back to the GPU. A plan says by itself what it reads and writes, so only
that is copied: of a ring's source what is sent in its first step, of a broadcast's root nothing comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from helixrt.collectives.memory import OperationMemory
from helixrt.collectives.reduction import Reduction
from helixrt.collectives.staging import Staging
from helixrt.protocol.collective.messages import Compute, Transmit
from helixrt.protocol.collective.plan import Copy, Node, Plan, Receive, Reduce, Region, Send, Space
from helixrt.transport.device_lanes import Mark
from helixrt.triton_kernels.reduction import reduce_copy
from helixrt.triton_kernels.warm_up import Variant, variant_of


def _moved(node: Node) -> tuple[Region, ...]:
    """What it reads on the host; a reduction reads the source on the card."""
    if isinstance(node, Copy):
        return (node.source,)
    return (node.region,) if isinstance(node, Send) else ()


def _written(node: Node) -> tuple[Region, ...]:
    if isinstance(node, Reduce):
        return node.into
    if isinstance(node, Copy):
        return (node.into,)
    return (node.region,) if isinstance(node, Receive) else ()


@dataclass(frozen=True)
class Traffic:
    """What a plan needs of the caller's tensors, in bytes."""

    reads: list[tuple[int, int]]  # of SOURCE, on the host: sorted, disjoint
    writes: list[tuple[int, int]]  # of OUT
    finals: dict[int, list[tuple[int, int]]]  # node -> the bytes of OUT that no other writes after it


def traffic(plan: Plan) -> Traffic:
    """Nodes are numbered so that each comes after those with smaller numbers only: the last writer has the last word.

    Two nodes that write the same bytes and are in no order would be an error of the plan (the tests' `plan_check`).
    """
    later: list[tuple[int, int]] = []
    finals: dict[int, list[tuple[int, int]]] = {}
    for number in reversed(range(len(plan.nodes))):
        for begin, end in _spans(_written(plan.nodes[number]), Space.OUT):
            if left := _without(begin, end, later):
                finals.setdefault(number, []).extend(left)
                later = _joined([*later, (begin, end)])
    reads = [span for node in plan.nodes for span in _spans(_moved(node), Space.SOURCE)]
    return Traffic(_joined(reads), later, finals)


def _spans(regions: Iterable[Region], space: Space) -> list[tuple[int, int]]:
    return [(r.offset, r.offset + r.length) for r in regions if r.space is space and r.length]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, and those that touch or overlap as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _without(begin: int, end: int, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of [begin, end) outside the sorted disjoint spans."""
    left = []
    for first, last in spans:
        if first >= end:
            break
        if begin < first:
            left.append((begin, first))
        begin = max(begin, last)
    return [*left, (begin, end)] if begin < end else left


class StagedOperation:
    """`source`, `out` and `scratch` are host memory; they are what the plan runs on."""

    def __init__(self, staging: Staging, plan: Plan, source: torch.Tensor, out: torch.Tensor) -> None:
        moves = traffic(plan)
        self._plan, self._finals = plan, moves.finals
        self._staged = staging.stage(source, out, moves.reads, moves.writes)
        self.source, self.out = self._staged.source, self._staged.out
        self.scratch = self._staged.scratch(plan.scratch_bytes) if plan.scratch_bytes else None
        self._on_card = source.data_ptr(), out.data_ptr()

    def variants(self, reduction: Reduction) -> set[Variant]:
        """The kernels that `carry_out` will launch; scratch memory begins at a boundary."""
        out, found = self.out, set()
        source_at, written_at = self._on_card
        bases = {Space.SOURCE: source_at, Space.OUT: out.data_ptr(), Space.SCRATCH: 0}
        for number, node in enumerate(self._plan.nodes):
            if not isinstance(node, Reduce) or not node.left.length:
                continue
            regions = (node.left, node.right, *node.into)
            addresses = [bases[region.space] + region.offset for region in regions]
            if (span := self._final(number, node)) is not None:
                addresses.append(written_at + span[0])
            divisor = reduction.divisor if node.last else 1
            found.add(variant_of(addresses, node.left.length // out.element_size(), out.dtype, reduction.op, divisor))
        return found

    def _final(self, number: int, work: Reduce) -> tuple[int, int] | None:
        """The bytes of the caller's result that the reduction `number` of the plan writes as well."""
        if len(work.into) == 1 and self._finals.get(number) == _spans(work.into, Space.OUT):
            return self._finals[number][0]
        return None

    def may(self, action: Compute | Transmit) -> bool:
        """Whether the bytes of the source that it takes from the host have come; never blocks."""
        regions = (action.region,) if isinstance(action, Transmit) else _moved(action.work)
        return all(self._staged.ready(begin, end) for begin, end in _spans(regions, Space.SOURCE))

    def carry_out(self, action: Compute, reduction: Reduction, memory: OperationMemory) -> Mark | None:
        """Queue a reduction on the card; `done` is to be called when the mark has passed. A copy is done at once (None).

        The source's operand is read where the caller has it, the other one in the pinned memory in which it came. The
        sum goes to pinned memory, from where it is sent; with the last one of these bytes also to the caller's memory.
        """
        work = action.work
        if isinstance(work, Copy):
            reduction.carry_out(work, memory)
            return None
        left, right = (self._operand(region, memory) for region in (work.left, work.right))
        into, written = [memory.tensor(region) for region in work.into], self._final(action.node, work)
        if written is not None:
            into.append(self._staged.on_card(False, *written))
        divisor = reduction.divisor if work.last else 1
        return self._staged.sum(lambda: reduce_copy(left, right, *into, op=reduction.op, divisor=divisor), written)

    def _operand(self, region: Region, memory: OperationMemory) -> torch.Tensor:
        if region.space is Space.SOURCE:
            return self._staged.on_card(True, region.offset, region.offset + region.length)
        return memory.tensor(region)

    def received(self, peer: int, index: int) -> None:
        self.done(self._plan.index.receives[peer][index])

    def done(self, node: int) -> None:
        """What is final by this node goes back to the card."""
        for begin, end in self._finals.get(node, ()):
            self._staged.landed(begin, end)

    def give_up(self) -> None:
        """It failed while sums were queued on the GPU."""
        self._staged.give_up(*(() if self.scratch is None else (self.scratch,)))

    def finish(self, then: Callable[[], object] | None) -> None:
        self._staged.finish(then)

    def join(self) -> None:
        self._staged.join()
