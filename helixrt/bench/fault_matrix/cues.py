"""What the conductor of a cell and its ranks say to each other: orders, and answers to them.

Sent as pickles over sockets between processes that one program started; nothing of it comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.bench.fault_matrix.cells import RANKS, Fault, Phase


@dataclass(frozen=True)
class Part:
    """What a process is to be. `rank` RANKS: nobody of the group, for attacks on it."""

    rank: int
    transport: str
    folder: str  # of its log and flight record
    heartbeat_s: float
    timeout_s: float  # of every exchange's call: far beyond the bounds, so what it ends was a hang
    secret: bytes
    host: str = "127.0.0.1"
    namespace: str = ""  # a network namespace's file

    @property
    def intrudes(self) -> bool:
        return self.rank == RANKS


@dataclass(frozen=True)
class Ready:
    """The first word of a process."""

    rank: int
    pid: int
    address: bytes
    store: str = ""  # rank 0 hosts the store


# ---- orders; each is answered with an Answer, if nothing else is said


@dataclass(frozen=True)
class Configure:
    generation: int
    members: tuple[int, ...]
    store: str


@dataclass(frozen=True)
class AllReduce:
    """`step` makes the sums of different calls differ."""

    step: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Arm:
    """From now on `fault` waits for the victim to come to `phase`'s place; not answered."""

    fault: Fault
    phase: Phase


@dataclass(frozen=True)
class Strike:
    """The fault strikes now, while nothing runs."""

    fault: Fault


@dataclass(frozen=True)
class Close:
    """Close the exchange."""


@dataclass(frozen=True)
class Open:
    """A new exchange, with a new endpoint. Answered with Ready."""


@dataclass(frozen=True)
class Notice:
    """Answered when the endpoint has reported a loss (`end_s`: when)."""


@dataclass(frozen=True)
class Count:
    """Answered with Refusals."""


@dataclass(frozen=True)
class Endure:
    """All-reduces with pauses for so long. Answered with Endured."""

    seconds: float
    members: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Endured:
    rank: int
    sums: int
    longest_s: float  # of one all-reduce
    problem: str = ""


@dataclass(frozen=True)
class Attack:
    """Claim to be a rank of `generation` towards `targets` (rank -> address), again and again. `Here` says that a round is
    over; `Cease` ends it."""

    generation: int
    targets: dict[int, bytes]


@dataclass(frozen=True)
class Cease:
    pass


@dataclass(frozen=True)
class End:
    """Leave in peace; not answered."""


# ---- between a victim at its place and the conductor


@dataclass(frozen=True)
class Here:
    """The victim is at its place, and waits for `Now`."""


@dataclass(frozen=True)
class Now:
    """The conductor has done its part: the victim does its own, and goes on if it can."""


@dataclass(frozen=True)
class Struck:
    """The fault strikes, at this monotonic time."""

    at_s: float


ORDERS = Configure | AllReduce | Arm | Strike | Close | Open | Notice | Count | Endure | Attack | Cease | End | Now
