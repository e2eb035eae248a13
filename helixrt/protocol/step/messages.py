"""What a step machine hears and what it answers: events and actions, all frozen.

In: nothing. Out: the vocabulary that `step.StepMachine` shares with whoever drives it, the job's leader
and the simulated world alike. DESIGN.md, "The life of a step", says what each is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.quorum import Member

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Begin:
    """Once, after the replica holds its first state."""


@dataclass(frozen=True)
class Formed:
    """A quorum with us formed; `entries` are the log's entries from our `len(log)` on, read after it formed."""

    generation: int
    members: tuple[Member, ...]
    entries: tuple[CommitRecord, ...] = ()


@dataclass(frozen=True)
class JoinFailed:
    """No quorum in time, or the membership service did not answer."""

    reason: str = ""


@dataclass(frozen=True)
class RingDone:
    """The ring of `rank` holds the reduced buckets of `generation`: its vote for the commit."""

    generation: int
    rank: int


@dataclass(frozen=True)
class RingFailed:
    """The ring of `rank` broke, or its deadline passed."""

    generation: int
    rank: int
    reason: str


@dataclass(frozen=True)
class Appended:
    """What stands at `index` of the log after our `Append`; ours or whoever was first."""

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
    """The answer to `Reload`: the durable state that was loaded."""

    lineage: str


@dataclass(frozen=True)
class Rested:
    """The answer to `Rest`: look again whether somebody needs us."""


Event = (
    Begin
    | Formed
    | JoinFailed
    | RingDone
    | RingFailed
    | Appended
    | LogRead
    | StoreLost
    | Fetched
    | FetchFailed
    | Reloaded
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
    gradients are preserved until then. A ring that contributes cannot be done before it, so it needs
    no answer of its own."""

    base: str
    position: int
    step: int


@dataclass(frozen=True)
class Exchange:
    """All rings: all-reduce among `members` in `generation`; answers `RingDone` or `RingFailed` a rank.

    `contribute`: our gradients (as they become ready), else zeros. `fresh`: connect anew, else the
    connections of the last exchange still stand. `contributors` is the divisor's count.
    """

    generation: int
    members: tuple[int, ...]
    contributors: tuple[int, ...]
    contribute: bool
    fresh: bool


@dataclass(frozen=True)
class Abort:
    """Break the running rings of `generation`; each still answers once."""

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
    """Update the state with the reduced buckets of the exchange just done; then offer them."""

    record: CommitRecord


@dataclass(frozen=True)
class Keep:
    """Keep the reduced buckets of the exchange just done for a `Replay` of this record."""

    record: CommitRecord


@dataclass(frozen=True)
class Forget:
    """Kept or fetched buckets of this record will not be replayed."""

    lineage: str


@dataclass(frozen=True)
class Replay:
    """Update the state with the kept (or fetched) reduced buckets of `record`; then offer them."""

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
    """Nobody holds a state of the chain: load the newest durable one on it; answers `Reloaded`."""


@dataclass(frozen=True)
class Rest:
    """The last step is done; serve state while others catch up, then answer `Rested`."""


Action = (
    Join
    | Work
    | Exchange
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
    | Rest
)
