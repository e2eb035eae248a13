"""One rank's work: carries out the leader's commands, and reports.

In: commands in order (`dispatch`, from one thread). Out: reports through a callable. Compute runs in the thread that calls
`next_work`, `finish` and `outcome` (the main thread: `Compute`), the exchange in a second (`ExchangeThread`), each snapshot
(`Serving`) and each fetch (`Fetching`) in one of its own; so gradients are summed while backward still runs, and state is
served and fetched while all of that goes on. In a run of one replica the main thread makes the exchange as well (`OwnSums`).
What may overlap and what may not is decided here:

- a bucket is exchanged when the work that the exchange belongs to has finished it;
- an update of the state waits for snapshots ordered before it, a snapshot for updates before it;
- gradients stay as they are until the next `Work` or update; reduced sets until they are two updates old.
"""

from __future__ import annotations

from helixrt.protocol.step import messages as p
from helixrt.replica.commands import Digest, Evaluate, Exit, LoadDurable, PrepareOrder, RankCommand, Save
from helixrt.replica.compute import Commands, Compute
from helixrt.replica.contracts import BatchEngine, WorkResult
from helixrt.replica.device_streams import DeviceStreams
from helixrt.replica.exchanging import ExchangeThread
from helixrt.replica.fetching import Fetching
from helixrt.replica.live_bytes import LOCAL, SNAPSHOTS, LiveBytes, bytes_of
from helixrt.replica.own_sums import OwnSums
from helixrt.replica.rank_parts import Done, Hooks, RankParts, WorkOrder
from helixrt.replica.reduced_sets import ReducedSets
from helixrt.replica.serving import Serving

__all__ = ["Done", "Hooks", "RankParts", "RankWorker", "WorkOrder"]


class RankWorker:
    """Owns the engine, the exchange and the transport of one rank, and the threads around them. A context manager: the
    threads run inside."""

    def __init__(self, parts: RankParts) -> None:
        self.parts = parts
        self.commands = Commands()
        self.reduced = ReducedSets(parts.transport)
        self.streams = streams = DeviceStreams([*parts.engine.buckets, *parts.engine.state().tensors.values()])
        self.serving = Serving(parts, streams, self.fail)
        self.fetching = Fetching(parts, self.reduced, self.fail)
        self.exchanging = ExchangeThread(parts, self.reduced, self.fetching, streams, self.fail)
        self.own_sums = OwnSums(parts, self.reduced) if parts.alone else None
        self.compute = Compute(parts, self.commands, self.reduced, self.serving, self.fetching, self.own_sums)

    # ---------------------------------------------------------------- commands, in order, never blocking

    def dispatch(self, command: RankCommand) -> None:
        """Take the next command; returns at once. Called from one thread."""
        match command:
            case p.Work():
                orders = self.own_sums or self.exchanging
                self.commands.put(orders.order_work(command.step, command.position, command.order))
            case p.Exchange() | p.Examine():
                if self.own_sums is not None:
                    self.commands.put(command)
                else:
                    self.exchanging.order(command)
            case p.Abort():
                self.exchanging.abort(command.generation)
            case p.Apply():
                if command.record.applied:  # taken now: the next exchange may begin before the main thread gets here
                    self.reduced.keep(command.record)
                self._order_update(command)
            case p.Replay() | p.Load() | LoadDurable():
                self._order_update(command)
            case p.Keep():
                self.reduced.keep(command.record)
            case p.Forget():
                self.fetching.forget(command.lineage)
            case p.Offer():
                self.serving.offer(command.lineage)
            case p.Withdraw():
                self.serving.withdraw(command.lineage)
            case p.FetchState() | p.FetchReduced():
                self.fetching.begin(command)
            case Evaluate() | Save() | Digest() | PrepareOrder() | Exit():
                self.commands.put(command)

    def _order_update(self, command: RankCommand) -> None:
        self.serving.update_ordered()
        self.commands.put(command)

    def fail(self, error: BaseException) -> None:
        """Make the main thread raise this, from any thread."""
        self.commands.fail(error)

    # ---------------------------------------------------------------- the main thread

    def next_work(self) -> WorkOrder | None:
        """Carry out commands until there is a batch to work on; None after `Exit`. See `Compute`."""
        return self.compute.next_work()

    def finish(self, order: WorkOrder, result: WorkResult) -> None:
        """The batch of the order is worked on. See `Compute`."""
        self.compute.finish(order, result)

    def outcome(self, order: WorkOrder) -> Done | None:
        """Carry out commands until the fate of the finished order is known; None: its work was dropped. See `Compute`."""
        return self.compute.outcome(order)

    def run(self) -> None:
        """Work on what is ordered until `Exit`; the engine finds its batches itself. Raises what makes this rank unable
        to go on."""
        engine = self.parts.engine
        assert isinstance(engine, BatchEngine)
        with self:
            while (order := self.next_work()) is not None:
                self.finish(order, engine.run(order.position, order.on_bucket))
                self.outcome(order)

    def live_bytes(self) -> LiveBytes:
        """What this rank's gradient sets and copies of states occupy now, by kind and device. From the main thread."""
        kinds = {LOCAL: list(self.parts.engine.buckets), **self.reduced.live(), SNAPSHOTS: self.serving.live()}
        return {kind: bytes_of(tensors) for kind, tensors in kinds.items()}

    # ---------------------------------------------------------------- begin and end

    def __enter__(self) -> RankWorker:
        if self.own_sums is None:
            self.exchanging.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, the exchange, the transport and the engine; idempotent."""
        self.exchanging.close()
        self.fetching.close()
        self.serving.close()
        self.parts.exchange.close()
        self.parts.transport.close()
        self.parts.engine.close()
