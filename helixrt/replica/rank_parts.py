"""What the parts of a rank share: its place and its means, the orders to its main thread, what the job adds.

The parts are `RankWorker` (commands), `Compute` (the main thread), `ExchangeThread`, `ReducedSets`, `Serving` and
`Fetching`; each has state of its own and a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from helixrt.collectives.exchange import Exchange
from helixrt.errors import Fatal
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.replica.commands import Evaluate, RankReport, Save
from helixrt.replica.contracts import Engine, StateTransport, Update, WorkResult
from helixrt.replica.layout_book import LayoutBook
from helixrt.replica.progress import Progress
from helixrt.timeouts import Timeouts

Buckets = list[torch.Tensor]


@dataclass(frozen=True)
class Done:
    """One update as a rank saw it: what was worked on, and how long the rank waited for others."""

    record: CommitRecord
    update: Update | None  # None: the record was not applied
    work: WorkResult | None  # None: the replica was behind and contributed nothing
    stall_s: float  # from the end of its work (or of the update before) to the update


@dataclass
class BatchNote:
    """What the program says of the batches of an order before its work ends. `digest`: of all of them (0: not known; a tensor
    is an int64 scalar that its device may compute later); `read_again` and `part`: see `RankDone`.
    `state`: a digest of that part of the state that the work begins with."""

    digest: int | torch.Tensor = 0
    read_again: tuple[int, int] | None = None
    state: int | torch.Tensor = 0
    part: str = ""


@dataclass(frozen=True)
class WorkOrder:
    """A batch that this rank has to work on: the one at `position` of the replica's stream, for update number `step`.

    `on_bucket` is what the engine calls for each bucket that is final; only the newest order's count as ready. `schedule`: the
    hash of the schedule's order to work by, "" for the one that the engine began with.
    """

    serial: int
    step: int
    position: int
    on_bucket: Callable[[int], None] = field(repr=False, compare=False)
    schedule: str = ""
    note: BatchNote = field(default_factory=BatchNote, repr=False, compare=False)


@dataclass
class Hooks:
    """What the job adds to a rank's life; called in the main thread, but for `stuck`. All optional.

    `stuck(why)`: compute has not given a gradient for longer than any step may take. Called from another
    thread, since nothing reaches a main thread that hangs; it should end the process. `load(lineage, initial)`: load
    this durable state (`initial`: the parameters that the engine began with, which it holds still) into the engine;
    False if it is not there any more. `evaluate(command)`: evaluate the state that the engine holds.
    `prepare_order(hash, again)`: make this order of the schedule ready, with `again` also if it is; raises HelixError if the
    engine cannot work by it. `use_order(hash)`: the next work is by this order, which is not that of the work before; "" is the
    one that the engine began with.
    """

    updated: Callable[[Done], None] = lambda done: None
    evaluate: Callable[[Evaluate], None] = lambda command: None
    save: Callable[[Save], None] = lambda command: None
    stuck: Callable[[str], None] = lambda why: None
    load: Callable[[str, bool], bool] = lambda lineage, initial: True
    prepare_order: Callable[[str, bool], None] = lambda order, again: _no_orders(order)
    use_order: Callable[[str], None] = lambda order: _no_orders(order)


@dataclass(frozen=True)
class RankParts:
    """What one rank is made of.

    `group_rank` is this rank's number in its replica, `rendezvous` the run's store with a prefix that is unique to the
    run and the group rank: `host:port/prefix`. `report` sends a report to the leader, from any thread. A replica
    that is behind waits at most `max_wait_s` for its fetch at an exchange. `layouts` has the layouts of offered states.
    `alone`: the run has this replica only, now and later. Its gradients are the sums (`OwnSums`), and no replica fetches them.
    `load_s`: reading durable state may take so long, if that is longer than an evaluation may. `replicas`: configured ones;
    digests of their batches travel beside the gradients (0: none do), and of their states, which are compared part by part in
    `check_every` steps (0: they are not).
    """

    replica: int
    group_rank: int
    engine: Engine
    exchange: Exchange
    transport: StateTransport
    record: FlightRecord
    timeouts: Timeouts
    rendezvous: str
    report: Callable[[RankReport], None]
    hooks: Hooks = field(default_factory=Hooks)
    max_wait_s: float = 0.0
    progress: Progress = field(default_factory=Progress)
    layouts: LayoutBook = field(default_factory=LayoutBook)
    alone: bool = False
    load_s: float = 0.0
    replicas: int = 0
    check_every: int = 0


def _no_orders(order: str) -> None:
    raise Fatal(f"this rank must work by the order {order} of a schedule, and its engine has no orders")


def state_name(lineage: str) -> str:
    """Under which the state of this lineage is offered."""
    return f"state-{lineage}"


def reduced_name(lineage: str) -> str:
    """Under which the sums of this record are offered."""
    return f"reduced-{lineage}"


def bucket_names(buckets: Sequence[torch.Tensor]) -> list[str]:
    """The shards of a set of sums."""
    return [f"bucket{i}" for i in range(len(buckets))]
