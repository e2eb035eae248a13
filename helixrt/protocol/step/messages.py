"""Events and actions of the step machine, all frozen.

In: nothing. Out: the vocabulary that `step.StepMachine` shares with its drivers, the job's leader and the
simulated world. `docs/concepts/step.md` describes their use.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.protocol.step.lineage import CommitRecord, Incarnation
from helixrt.protocol.step.quorum import Member
from helixrt.protocol.step.supersede import Evidence

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Begin:
    """Once, after the replica holds its first state."""


@dataclass(frozen=True)
class Formed:
    """A quorum with us formed; `entries` are the log's entries from our `len(log)` on, read after it formed.

    `generation` is the membership service's number of it; the machine's own is at least that. The log's entries before `begin`
    are not needed any more.
    """

    generation: int
    members: tuple[Member, ...]
    entries: tuple[CommitRecord, ...] = ()
    begin: int = 0


@dataclass(frozen=True)
class JoinFailed:
    """No quorum in time, or the membership service did not answer."""

    reason: str = ""


@dataclass(frozen=True)
class RankDone:
    """The exchange of group rank `rank` is done: it holds the sums of `generation`. Its vote for the commit.

    `finite`: no number in its buckets is infinite or NaN. `batches`: by replica, a digest of the batches that the equal rank
    read for this step; 0 or missing: not known. `read_again`: (position, digest) of the batches before the first one that this
    process worked on, as it read them. `states`: by replica, a digest of a part of the state that the step began with, as the
    equal rank holds it (0 or missing: not known); `part` says which entries that are.
    """

    generation: int
    rank: int
    finite: bool = True
    batches: tuple[int, ...] = ()
    read_again: tuple[int, int] | None = None
    states: tuple[int, ...] = ()
    part: str = ""


@dataclass(frozen=True)
class RankFailed:
    """The exchange of group rank `rank` broke, or its deadline passed. `suspects` are the replicas that did not respond or
    closed its connection; none if it was aborted from here."""

    generation: int
    rank: int
    reason: str
    suspects: tuple[int, ...] = ()


@dataclass(frozen=True)
class Examined:
    """The answer of `rank` to `Examine`: whether its own preserved gradient is finite."""

    generation: int
    rank: int
    finite: bool


@dataclass(frozen=True)
class Appended:
    """The record at `index` of the log after our `Append`: ours, or that of the replica that was first."""

    index: int
    standing: CommitRecord


@dataclass(frozen=True)
class LogRead:
    """The answer to `ReadLog`: all entries from its index on."""

    entries: tuple[CommitRecord, ...]


@dataclass(frozen=True)
class StoreLost:
    """The store did not answer the last `Append` or `ReadLog`; its effect is unknown."""


@dataclass(frozen=True)
class Fetched:
    """All ranks have fetched what `FetchState` or `FetchReduced` of `lineage` asked for."""

    lineage: str


@dataclass(frozen=True)
class FetchFailed:
    lineage: str
    reason: str


@dataclass(frozen=True)
class Reloaded:
    """The answer to `Reload`: what is held now, a newer durable state or what was held before."""

    lineage: str


@dataclass(frozen=True)
class WaitEnded:
    """The answer to `Wait`: what the store holds about the head now."""

    evidence: Evidence


@dataclass(frozen=True)
class HoldEnded:
    """The answer to `Hold`: look again whether the fetch is there."""


@dataclass(frozen=True)
class OrderReady:
    """All ranks of this replica have the order of the schedule with this hash ready: from the next quorum on work is by it."""

    order: str


@dataclass(frozen=True)
class Rested:
    """The answer to `Rest`: check again whether another replica needs this one."""


Event = (
    Begin
    | Formed
    | JoinFailed
    | RankDone
    | RankFailed
    | Examined
    | Appended
    | LogRead
    | StoreLost
    | Fetched
    | FetchFailed
    | Reloaded
    | WaitEnded
    | HoldEnded
    | OrderReady
    | Rested
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True)
class Join:
    """Ask for a quorum with this account of ourselves (addresses are filled in by the driver)."""

    me: Member


@dataclass(frozen=True)
class Work:
    """Forward and backward for step `step`: the batch at `position` on the state `base`; replaces earlier work, whose
    gradients are preserved until then. A rank that contributes cannot be done before it, so it needs
    no answer of its own. `order`: the hash of the order of the schedule to work by ("": the one that the replica began with);
    since all ranks work through the same commands, they change it before the same step."""

    base: str
    position: int
    step: int
    order: str = ""


@dataclass(frozen=True)
class Exchange:
    """All ranks: all-reduce among `members` in `generation`; answers `RankDone` or `RankFailed` a rank.

    `contribute`: our gradients (as they become ready), else zeros. `fresh`: connect again, else the
    connections of the last exchange still stand. `contributors` is the divisor's count.
    """

    generation: int
    members: tuple[int, ...]
    contributors: tuple[int, ...]
    contribute: bool
    fresh: bool


@dataclass(frozen=True)
class Examine:
    """A sum of `generation` was not finite: each rank tests its own preserved gradient; answers `Examined`."""

    generation: int


@dataclass(frozen=True)
class Abort:
    """Break the running exchanges of `generation`; each still answers once."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Append:
    """Put `record` at `index` of the log unless something stands there; answers `Appended`."""

    index: int
    record: CommitRecord


@dataclass(frozen=True)
class ReadLog:
    """Read the log from `index` on; answers `LogRead`."""

    index: int


@dataclass(frozen=True)
class Persist:
    """Write the log's entry durably (it was decided)."""

    index: int
    record: CommitRecord


@dataclass(frozen=True)
class Apply:
    """Update the state with the reduced buckets of the exchange just done; then offer them.

    A record with `applied` False has no buckets: the state stays and is that of the record from now on.
    """

    record: CommitRecord


@dataclass(frozen=True)
class Keep:
    """Keep the reduced buckets of the exchange just done for a `Replay` of this record."""

    record: CommitRecord


@dataclass(frozen=True)
class Forget:
    """Kept or fetched buckets of this record will not be replayed, nor its state loaded: a fetch of either is given up."""

    lineage: str


@dataclass(frozen=True)
class Replay:
    """Update the state with the kept (or fetched) reduced buckets of `record`, if it has any; then offer them."""

    record: CommitRecord


@dataclass(frozen=True)
class Load:
    """Take the fetched state `lineage` as ours."""

    lineage: str


@dataclass(frozen=True)
class Offer:
    """Snapshot the state we hold and serve it under its lineage hash until `Withdraw`."""

    lineage: str


@dataclass(frozen=True)
class Withdraw:
    lineage: str


@dataclass(frozen=True)
class FetchState:
    """Fetch the state `lineage` from `donors` (replica, addresses); a newer fetch replaces an older."""

    lineage: str
    donors: tuple[Member, ...]


@dataclass(frozen=True)
class FetchReduced:
    """Fetch the kept reduced buckets of the record `lineage`; kept for a `Replay`."""

    lineage: str
    donors: tuple[Member, ...]


@dataclass(frozen=True)
class Reload:
    """Load the newest durable state of the chain if its step is above `newer_than`, else keep what is held; answers
    `Reloaded`. With `newer_than` -1 nothing of use is held, and the initial parameters count as durable."""

    newer_than: int


@dataclass(frozen=True)
class Wait:
    """The quorum `generation` does not hold the head `head` and may not supersede it yet: count the wait in the store,
    collect the evidence; answers `WaitEnded`. `missing` may hold it and have not ended; `waited_s` was observed."""

    generation: int
    head: CommitRecord
    missing: tuple[Incarnation, ...]
    waited_s: float


@dataclass(frozen=True)
class WaitOver:
    """A quorum holds the head `head`: its counter of waiting starts again. Needs no answer."""

    generation: int
    head: CommitRecord


@dataclass(frozen=True)
class Hold:
    """Nothing is exchanged while replica `replica` fetches; answers `HoldEnded` after a moment."""

    replica: int


@dataclass(frozen=True)
class Restart:
    """This replica must start again, for this reason."""

    reason: str


@dataclass(frozen=True)
class Refuse:
    """The run must not go on, for this reason, which is the same at the leader of each replica."""

    reason: str


@dataclass(frozen=True)
class Differ:
    """Replicas hold different states before `step`; the same at the leader of each. The run must not go on from here.

    Rank `rank` of the replicas `replicas` found it in `part` of its state, with another digest in those that are `odd`
    (empty without a majority). `safe`: the newest step after which all of the state was found equal.
    """

    generation: int
    step: int
    safe: int
    rank: int
    replicas: tuple[int, ...]
    odd: tuple[int, ...]
    part: str


@dataclass(frozen=True)
class Tell:
    """Say this once to the user."""

    text: str


@dataclass(frozen=True)
class Rest:
    """The last step is done; serve state while others catch up, then answer `Rested`."""


Action = (
    Join
    | Work
    | Exchange
    | Examine
    | Abort
    | Append
    | ReadLog
    | Persist
    | Apply
    | Keep
    | Forget
    | Replay
    | Load
    | Offer
    | Withdraw
    | FetchState
    | FetchReduced
    | Reload
    | Wait
    | WaitOver
    | Hold
    | Restart
    | Refuse
    | Differ
    | Tell
    | Rest
)
