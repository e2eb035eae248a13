"""Executes the plans of all ranks on bytes, without a clock: the oracle of plans and of the collective machine.

In: plans, everyone's numbers, a seed. Out: everyone's memory afterwards. Every rank has a `CollectiveMachine`;
messages, reductions and acknowledgements happen in a seeded random order. A send needs its receiver's `Await`
(credit), and its bytes are read when it is delivered, so memory that is written too early gives a wrong sum.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from helixrt.emulate.plans import Memory
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.messages import Await, Compute, Computed, Done, Event, Received, Sent, Submitted, Transmit
from helixrt.protocol.collective.plan import Plan, Region


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
