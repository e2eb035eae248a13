"""Executes the plans of all ranks on bytes, without a clock: the oracle of plans and of the collective machine.

In: plans, everyone's numbers, a seed. Out: everyone's memory afterwards. Every rank has a `CollectiveMachine`;
messages, reductions and acknowledgements happen in a seeded random order. A send needs its receiver's `Await`
(credit), and its bytes are read when it is delivered, so memory that is written too early gives a wrong sum.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from operator import add

from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.messages import Await, Compute, Computed, Done, Event, Received, Sent, Submitted, Transmit
from helixrt.protocol.collective.plan import Copy, Plan, Reduce, Region, Space

ELEMENT = 8  # bytes


class Memory:
    """One rank's memory for one collective, of elements of array type `code` ("q", "d" or "f").

    With `shift`, OUT begins `shift` bytes after the beginning of SOURCE in the same memory.
    """

    def __init__(self, source: Sequence[float], out_bytes: int, scratch_bytes: int, shift: int | None, code: str = "q") -> None:
        self.code = code
        given = array(code, source).tobytes()
        self.scratch = bytearray(b"\xee" * scratch_bytes)
        if shift is None:
            self.source, self.out = memoryview(bytearray(given)), memoryview(bytearray(b"\xdd" * out_bytes))
        else:
            begin, end = min(0, shift), max(len(given), shift + out_bytes)
            shared = memoryview(bytearray(b"\xdd" * (end - begin)))
            self.source = shared[-begin : len(given) - begin]
            self.out = shared[shift - begin : shift - begin + out_bytes]
            self.source[:] = given
        self.given = given
        self._of = {Space.SOURCE: self.source, Space.OUT: self.out, Space.SCRATCH: memoryview(self.scratch)}

    def view(self, region: Region) -> memoryview:
        return self._of[region.space][region.offset : region.offset + region.length]

    def carry_out(self, work: Reduce | Copy) -> None:
        if isinstance(work, Copy):
            self.view(work.into)[:] = bytes(self.view(work.source))
            return
        left, right = (array(self.code, bytes(self.view(term))) for term in (work.left, work.right))
        total = array(self.code, map(add, left, right)).tobytes()
        for region in work.into:
            self.view(region)[:] = total

    def arrived(self, content: memoryview, where: Await) -> None:
        """A message is whole."""
        if where.left is None:
            self.view(where.region)[:] = content
        else:
            left, right = (array(self.code, bytes(term)) for term in (self.view(where.left), content))
            self.view(where.region)[:] = array(self.code, map(add, left, right)).tobytes()

    def numbers(self) -> list[float]:
        return list(array(self.code, bytes(self.out)))


def run_plans(
    plans: Sequence[Plan],
    sources: Sequence[Sequence[float]],
    out_bytes: Sequence[int],
    seed: int = 0,
    window_bytes: int = 1,
    shift: Sequence[int] | None = None,
    code: str = "q",
) -> list[Memory]:
    """All ranks' memories after one collective of elements of array type `code`; raises AssertionError if it does not end."""
    chance = random.Random(seed)
    ranks = range(len(plans))
    machines = [CollectiveMachine(r, len(plans), window_bytes) for r in ranks]
    shifts = [None] * len(plans) if shift is None else shift
    memories = [Memory(sources[r], out_bytes[r], plans[r].scratch_bytes, shifts[r], code) for r in ranks]
    posted: dict[tuple[int, int, int], Await] = {}
    waiting: dict[tuple[int, int, int], Region] = {}
    todo: list[tuple[str, int, object]] = []
    done: set[int] = set()

    def tell(rank: int, event: Event) -> None:
        for action in machines[rank].on(event):
            match action:
                case Transmit():
                    name = (rank, action.peer, action.index)
                    waiting[name] = action.region
                    if name in posted:
                        todo.append(("deliver", rank, name))
                case Await():
                    name = (action.peer, rank, action.index)
                    posted[name] = action
                    if name in waiting:
                        todo.append(("deliver", rank, name))
                case Compute():
                    todo.append(("compute", rank, action))
                case Done():
                    done.add(rank)
                case other:
                    raise AssertionError(other)

    for rank in chance.sample(ranks, len(ranks)):
        tell(rank, Submitted(0, plans[rank]))
    while todo:
        i = chance.randrange(len(todo))
        todo[i], todo[-1] = todo[-1], todo[i]
        kind, rank, what = todo.pop()
        if kind == "deliver":
            assert isinstance(what, tuple)
            sender, receiver, index = what
            memories[receiver].arrived(memories[sender].view(waiting.pop(what)), posted.pop(what))
            todo += [("sent", sender, Sent(0, receiver, index)), ("received", receiver, Received(0, sender, index))]
        elif kind == "compute":
            assert isinstance(what, Compute)
            memories[rank].carry_out(what.work)
            tell(rank, Computed(0, what.node))
        else:
            tell(rank, what)  # type: ignore[arg-type]
    assert done == set(ranks), f"ranks {set(ranks) - done} did not end"
    assert all(machine.idle for machine in machines)
    return memories
