"""The functions that a job gives to the leader of a replica (`helixrt.replica.leader`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.replica.commands import RankCommand
from helixrt.replica.contracts import Formed


@dataclasses.dataclass
class LeaderHooks:
    """What the job adds; called by the thread that handles an event, one call at a time, so they must not block for long
    (`resting`: in the coordination thread, where it may, and may raise Retryable).

    `leaving()`: why this replica is to leave before its next quorum ("": it stays); in the coordination thread, may raise
    Retryable. `departed(machine, why)`: it takes part no more; end its ranks. `agree(formed, me)`: before the first commit,
    the event for the machine in place of the quorum, if any; as `leaving`. `decided(index, record)`: the log has this
    entry; write it durably. `ordered(command)`: it was sent to the ranks. `resting(done)`: the last step is done; returns True
    when this replica may leave, called again and again. `broken(error)`: end this process. `waiting(action)`: the quorum waits
    for a holder of newer state; called again and again. `durable(newer_than)`: the lineage hash of the newest durable state of
    the chain with a higher step (that of the initial parameters if there is no other and `newer_than` is -1), or None; called
    in the coordination thread. `doing(what)`: while an event is handled, for the progress report. `measured(times)`: what a
    rank measured. `prepared(order, seconds, failed)`: all ranks have answered `Leader.prepare`, the slowest after so long;
    `failed` is why one of them cannot work by the order, "" if all can: then work is by it from the next quorum on.
    `differ(action)`: replicas hold different states; in the coordination thread, raises what ends this process.
    """

    decided: Callable[[int, CommitRecord], None]
    ordered: Callable[[RankCommand], None]
    resting: Callable[[StepMachine], bool]
    broken: Callable[[BaseException], None]
    waiting: Callable[[p.Wait], None] = lambda action: None
    say: Callable[[str], None] = lambda text: None
    leaving: Callable[[], str] = lambda: ""
    departed: Callable[[StepMachine, str], None] = lambda machine, why: None
    agree: Callable[[Formed, Member], p.Event | None] = lambda formed, me: None
    durable: Callable[[int], str | None] = lambda newer_than: None
    doing: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
    measured: Callable[[str], None] = lambda times: None
    prepared: Callable[[str, float, str], None] = lambda order, seconds, failed: None
    differ: Callable[[p.Differ], None] = lambda action: None
