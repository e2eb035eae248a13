"""Events (input) and actions (output) of the collective machine, all frozen.

In: nothing. Out: the types that `collective.CollectiveMachine` shares with its drivers, a
communicator's progress loop and the simulated world. `op` numbers the collectives of one
generation in the order in which every rank submits them; point-to-point operations have numbers of
their own (`op` < 0) that both ends derive from the user's tag.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.errors import Cause
from helixrt.protocol.collective.plan import Copy, Plan, Reduce, Region

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Submitted:
    """The caller gave memory for `op`; its plan may begin."""

    op: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Sent:
    """The memory of the send may be written again: the peer has the bytes, or the link has a copy."""

    op: int
    peer: int
    index: int


@dataclass(frozen=True, slots=True)
class Received:
    op: int
    peer: int
    index: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The reduction or copy of node `node` is done."""

    op: int
    node: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to `peer` failed permanently, or the liveness rules declared the peer lost."""

    peer: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Aborted:
    """The caller, or a peer's abort that arrived, ends this generation."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline of `op` passed."""

    op: int


Event = Submitted | Sent | Received | Computed | PeerLost | Aborted | Expired

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Transmit:
    op: int
    peer: int
    index: int
    region: Region


@dataclass(frozen=True, slots=True)
class Await:
    """Let the link receive straight into `region`; with `left`, reduced with that as it comes (`plan.Receive`)."""

    op: int
    peer: int
    index: int
    region: Region
    left: Region | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Carry out `work`; answers `Computed`."""

    op: int
    node: int
    work: Reduce | Copy


@dataclass(frozen=True, slots=True)
class Done:
    op: int


@dataclass(frozen=True, slots=True)
class Failed:
    """`op` had begun and cannot be finished; its OUT memory is undefined."""

    op: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Skipped:
    """`op` was queued behind the first error and never began: nothing of it was sent or written."""

    op: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Break:
    """Once, at the first error: send the reason to every reachable peer (`cause` is the first reason, and the same for all)."""

    cause: Cause


Action = Transmit | Await | Compute | Done | Failed | Skipped | Break
