"""A rank that follows: takes its orders from the leader of its replica through the run's store, and reports the same way."""

from __future__ import annotations

import threading

from helixrt.errors import Fatal
from helixrt.job.rank_context import RankContext
from helixrt.observe.stamps import RankTimes
from helixrt.replica.commands import Channel, Measured, RankReport, orders_channel, reports_channel
from helixrt.replica.rank import RankWorker
from helixrt.replica.rank_monitor import PublishedMonitor


class Following:
    """From `begin` to `close`."""

    def __init__(self, context: RankContext) -> None:
        life, patience_s = context.life, context.timeouts.step_s
        self._context = context
        self._reports = Channel(context.store, reports_channel(life, context.group_rank), patience_s)
        self._lock = threading.Lock()  # exchange, fetch and main threads all report
        self._orders = Channel(context.store, orders_channel(life), patience_s)
        self._monitor: PublishedMonitor | None = None

    def begin(self, worker: RankWorker) -> None:
        """Have the leader watch this process, and give `worker` its orders."""
        context = self._context
        secret = context.spec.secret.encode()
        self._monitor = PublishedMonitor(context.store, context.life, context.group_rank, context.interface, secret)
        self._orders.follow(worker.dispatch, lambda why: worker.fail(Fatal(why)))

    def report(self, report: RankReport) -> None:
        """Tell the leader; from any thread. Raises Retryable without the store."""
        with self._lock:
            self._reports.put(report)

    def measured(self, times: RankTimes) -> None:
        """As `report`."""
        self.report(Measured(times.to_json()))

    def close(self) -> None:
        """Idempotent."""
        if self._monitor is not None:
            self._monitor.close()
        self._orders.close()
