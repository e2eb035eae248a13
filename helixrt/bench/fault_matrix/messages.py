"""Messages between the driver of a cell and its ranks: orders, and answers to them.

They are pickles over sockets between processes that one program started; no other program can send them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from helixrt.bench.fault_matrix.cells import RANKS, Fault, Phase


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of one process. `rank` RANKS: an intruder, which is not a member of the group."""

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
    """The first message of a process."""

    rank: int
    pid: int
    address: bytes
    store: str = ""  # rank 0 hosts the store


class Command(Enum):
    """Messages without arguments. Those of the driver are answered with an Answer, unless stated otherwise."""

    CLOSE = "close the exchange"
    OPEN = "open a new exchange, with a new endpoint"  # answered with Ready
    NOTICE = "answer when the endpoint has reported a loss"  # `end_s`: when
    COUNT = "how many were refused"  # answered with Refusals
    NOW = "inject the fault, then continue if possible"  # to a victim that has sent HERE; an outside fault is injected already
    CEASE = "end the attack"
    END = "end the process"  # not answered
    HERE = "ready for the fault"  # of a victim, which waits for NOW; of an intruder: it has tried each claim once


# ---- orders; each is answered with an Answer, unless stated otherwise


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
    """Inject `fault` when the victim reaches the injection point of `phase`; not answered."""

    fault: Fault
    phase: Phase


@dataclass(frozen=True)
class Inject:
    """Inject the fault now, while no call runs."""

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
    """Connect to `targets` (rank -> address) repeatedly and claim to be a rank of `generation`. HERE is sent after the first
    round; CEASE ends the attack."""

    generation: int
    targets: dict[int, bytes]


# ---- from a victim at the injection point


@dataclass(frozen=True)
class Injected:
    """The fault is injected, at this monotonic time."""

    at_s: float


ORDERS = Configure | AllReduce | Arm | Inject | Endure | Attack | Command
