"""The leader's part in changing the order of its replica's schedule: measured costs in, commands to its ranks out.

In: at each step boundary what the replica's ranks measured; the planner's answers; the ranks' answers. Out: `PrepareOrder`
for all ranks, which come to it at the same point of their commands, and then work by the order from the same step on
(`OrderReady` of the step machine); events of the flight record; lines for the user. `schedule.adaptation.policy` decides.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from helixrt.errors import Retryable
from helixrt.job.order_planner import OrderPlanner
from helixrt.job.orders import RankOrders
from helixrt.observe.estimates import MeasuredCosts
from helixrt.record import FlightRecord, Kind
from helixrt.replica.commands import PrepareOrder
from helixrt.schedule.adaptation.judge import Answer, Observed
from helixrt.schedule.adaptation.policy import Adaptation, Ask, Decision, OrderPolicy, Switch
from helixrt.schedule.costs import uniform
from helixrt.schedule.exchange.as_json import order_key

_GAIN_STEPS = 5  # before and after a switch, whose median times are compared
_SETTLING = 1  # steps after a switch that are not


class OrderAdapter:
    """Of one replica, on its leading rank. Every method is called by the thread that handles the leader's events, one call at a
    time. `in_use`: the hash of the order that the replica begins with, "" for the first one. `estimates()`: what was measured so
    far, cheap enough for every step; None while that is not enough."""

    def __init__(
        self,
        orders: RankOrders,
        rules: Adaptation,
        last_step: int,
        in_use: str,
        estimates: Callable[[], MeasuredCosts | None],
        tell: Callable[[PrepareOrder], None],
        record: FlightRecord,
        say: Callable[[str], None],
    ) -> None:
        self._orders, self._estimates, self._tell, self._record, self._say = orders, estimates, tell, record, say
        first = orders.first
        self._policy = OrderPolicy(first, rules, last_step, orders.schedule(in_use) if in_use else None)
        self._first = order_key(first)
        self._base = uniform(first.stages).split(first.placement)  # of what a run without W of its own does not measure
        self._planner = OrderPlanner()
        self._ready = {self._first, self._policy.in_use}  # orders that all ranks have made ready
        self._pending: Switch | None = None
        self._step, self._seen = 0, -1  # done; the newest that the estimates know
        self._done_s = time.monotonic()
        self._took_ms: deque[float] = deque(maxlen=_GAIN_STEPS)  # of the newest steps by the order in use
        self._changed_ms: float | None = None  # median of the steps before the last switch, until its gain is told
        self._last: Switch | None = None

    # ---------------------------------------------------------------- events

    def boundary(self, step: int) -> None:
        """Update number `step` was ordered, and the next step's work was not."""
        now_s = time.monotonic()
        self._took_ms.append((now_s - self._done_s) * 1e3)
        self._done_s, self._step = now_s, step
        self._tell_gain()
        answer = self._planner.answer()
        if isinstance(answer, Answer):
            self._carry_out(self._policy.answered(step, answer))
        elif answer is not None:
            self._policy.unanswered()
            self._say(f"the schedule stays as it is: {answer}")
        measured = self._estimates()
        if measured is None or measured.step <= self._seen or measured.lacking():
            return
        self._seen = measured.step
        if isinstance(answer, Answer) and self._pending is not None:
            return  # decided at this boundary already
        base = self._base
        observed = Observed(measured.costs(base=base), measured.spread(base=base))
        self._carry_out(self._policy.observed(step, observed))

    def prepared(self, order: str, seconds: float, failed: str) -> None:
        """All ranks have answered `PrepareOrder`."""
        pending, self._pending = self._pending, None
        assert pending is not None, f"nobody asked for the order {order}"
        self._record.write(Kind.ORDER_READY, order=pending.key, seconds=seconds, failed=failed)
        if failed:
            self._policy.refuse(pending.key, seconds * 1e3)
            self._say(f"the order {pending.key} of the schedule is not used: {failed}")
            return
        self._policy.switched(self._step, pending.key, 0.0 if pending.key in self._ready else seconds * 1e3)
        self._ready.add(pending.key)
        self._last, self._changed_ms = pending, statistics.median(self._took_ms)
        self._took_ms.clear()

    def close(self) -> None:
        """End the planner; idempotent."""
        self._planner.close()

    # ---------------------------------------------------------------- decisions

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Ask):
            self._record.write(Kind.REPLAN, step=self._step, why=decision.why)
            self._planner.ask(decision.question)
        elif isinstance(decision, Switch):
            self._begin_switch(decision)

    def _begin_switch(self, switch: Switch) -> None:
        try:
            self._orders.book.put(switch.order)
        except (Retryable, OSError) as error:
            self._policy.postpone()
            self._say(f"the order {switch.key} of the schedule cannot be stored now: {error}")
            return
        self._pending = switch
        self._record.write(
            Kind.ORDER,
            step=self._step,
            order=switch.key,
            before=self._policy.in_use,
            why=switch.why,
            present_ms=switch.present_ms,
            predicted_ms=switch.predicted_ms,
        )
        self._say(
            f"after step {self._step} the schedule's order becomes {switch.key}: {switch.why}; predicted "
            f"{switch.present_ms:.4g} ms a step before, {switch.predicted_ms:.4g} ms after"
        )
        self._tell(PrepareOrder("" if switch.key == self._first else switch.key))

    def _tell_gain(self) -> None:
        """What the last switch has brought, as soon as enough steps were measured after it."""
        last, before_ms = self._last, self._changed_ms
        if last is None or before_ms is None or len(self._took_ms) < _GAIN_STEPS:
            return
        after_ms = statistics.median(list(self._took_ms)[_SETTLING:])
        self._changed_ms = None
        self._record.write(
            Kind.ORDER_GAIN, step=self._step, order=last.key, before_ms=before_ms, after_ms=after_ms, predicted_ms=last.gain_ms
        )
