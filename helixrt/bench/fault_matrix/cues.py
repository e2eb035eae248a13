"""What the conductor of a cell and its ranks say to each other: orders, and answers to them.

Sent as pickles over sockets between processes that one program started; nothing of it comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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


class Word(Enum):
    """What is said without anything further. The conductor's are answered with an Answer, if nothing else is said."""

    CLOSE = "close the exchange"
    OPEN = "open a new exchange, with a new endpoint"  # answered with Ready
    NOTICE = "answer when the endpoint has reported a loss"  # `end_s`: when
    COUNT = "how many were refused"  # answered with Refusals
    NOW = "I have done my part: do yours, and go on if you can"  # to a victim at its place
    CEASE = "enough of the attack"
    END = "leave in peace"  # not answered
    HERE = "I am at my place"  # of a victim, which waits for NOW; of an intruder: a round is over


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
    """Claim to be a rank of `generation` towards `targets` (rank -> address), again and again. HERE says that a round is
    over; CEASE ends it."""

    generation: int
    targets: dict[int, bytes]


# ---- of a victim at its place


@dataclass(frozen=True)
class Struck:
    """The fault strikes, at this monotonic time."""

    at_s: float


ORDERS = Configure | AllReduce | Arm | Strike | Endure | Attack | Word
