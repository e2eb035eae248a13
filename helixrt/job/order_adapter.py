"""The leader's part in changing the order of its replica's schedule: measured costs in, one order for all of its ranks out.

In: what the replica's ranks measured, its steps, and the ranks' answers. Out: calls of `prepare`, which have all ranks make an
order ready at the same point of their commands, and work by it from the same step on (`OrderReady` of the step machine); events
of the flight record; lines for the user. Before the first judgement the ranks make the order in use ready once more: how long
that takes says what a switch costs. A thread of its own judges and waits for the planner, so that no step does;
`schedule.adaptation.policy` decides.
"""

from __future__ import annotations

import math
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from helixrt.errors import Retryable
from helixrt.job.order_planner import OrderPlanner
from helixrt.job.orders import RankOrders
from helixrt.observe.estimates import MeasuredCosts
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.adaptation.judge import Answer, CostEstimate
from helixrt.schedule.adaptation.policy import Adaptation, Ask, Decision, OrderPolicy, Switch
from helixrt.schedule.costs import uniform
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.simulate import DELEGATED, Comm

_GAIN_STEPS = 5  # before and after a switch, whose median times are compared
_REST, _REST_CHANGED = 4, 1  # times as long as the last answer took, until the next question; if a cost has changed since
CALM_S = 1.0  # between two judgements, while no cost has changed
_CLOSE_S = 5.0


@dataclass(frozen=True)
class _StepDone:
    step: int
    at_s: float


@dataclass(frozen=True)
class _Measured:
    rank: str
    step: int
    changed_at: int | None  # the step with which a cost became another one


@dataclass(frozen=True)
class _Prepared:
    order: str
    seconds: float
    failed: str


class OrderAdapter:
    """Of one replica of so many `ranks`, on its leading rank; begins with `start`. `in_use()`: the hash of the order that the
    replica works by when the first costs come, "" for the first one. `estimates()`: what was measured so far, None while that
    is not enough. `prepare(order, rehearsal)`: see `Leader.prepare`. `broken(error)` ends this rank.
    """

    def __init__(
        self,
        orders: RankOrders,
        rules: Adaptation,
        last_step: int,
        ranks: int,
        in_use: Callable[[], str],
        estimates: Callable[[], MeasuredCosts | None],
        prepare: Callable[[str, bool], None],
        record: FlightRecord,
        say: Callable[[str], None],
        broken: Callable[[BaseException], None],
        comm: Comm = DELEGATED,
    ) -> None:
        self._orders, self._ranks, self._estimates, self._prepare = orders, ranks, estimates, prepare
        self._record, self._say, self._broken = record, say, broken
        first = orders.first
        self._rules, self._last_step, self._in_use, self._comm = rules, last_step, in_use, comm
        self._first = order_key(first)
        # What is not measured: the caps, and how a backward that ran whole divides.
        self._base = uniform(first.stages, memory=rules.memory or math.inf).split(first.placement)
        self._planner = OrderPlanner()
        self._news: queue.SimpleQueue[_StepDone | _Prepared | _Measured | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="helixrt-order-adapter", daemon=True)
        # Below: of the thread.
        self._heard: dict[str, int] = {}  # the newest step that each rank has measured
        self._judged = 0  # the newest step of which all ranks' measurements were judged: both ends of a link are in them
        self._judged_s = -math.inf
        self._changed = False  # a cost, since then
        self._changed_at = 0  # the step with which the newest of all changes of costs began
        self._answered_s, self._answer_took_s = -math.inf, 0.0  # the last question
        self._ready = {self._first}  # orders that all ranks have made ready
        self._rehearsed: bool | None = None  # False: the ranks are at it
        self._pending: Switch | None = None  # the ranks make it ready
        self._done = _StepDone(0, record.clock())
        self._took_ms: deque[tuple[int, float]] = deque(maxlen=_GAIN_STEPS)  # of the newest steps by the order in use
        self._gain: tuple[Switch, float] | None = None  # that is not told yet: the last switch, the steps' median before it

    # ---------------------------------------------------------------- news, from any thread

    def start(self) -> None:
        """From now on orders may change."""
        self._thread.start()

    def step_done(self, step: int) -> None:
        """Update number `step` was ordered."""
        self._news.put(_StepDone(step, self._record.clock()))

    def measured(self, rank: str, step: int, changed_at: int | None = None) -> None:
        """A rank has measured this step, and maybe some before it; `changed_at`: by it a cost is known to be another one since
        that step."""
        self._news.put(_Measured(rank, step, changed_at))

    def prepared(self, order: str, seconds: float, failed: str) -> None:
        """All ranks have answered `prepare`."""
        self._news.put(_Prepared(order, seconds, failed))

    def close(self) -> None:
        """End the planner and the thread; idempotent."""
        self._news.put(None)
        self._planner.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    # ---------------------------------------------------------------- its own thread

    def _run(self) -> None:
        try:
            while (news := self._news.get()) is not None:
                match news:
                    case _StepDone():
                        self._count(news)
                    case _Prepared():
                        self._prepared(news)
                    case _Measured():
                        self._heard[news.rank] = news.step
                        if news.changed_at is not None:
                            self._changed, self._changed_at = True, max(self._changed_at, news.changed_at)
                        if self._due(time.monotonic()):
                            self._judge()
        except BaseException as error:
            self._broken(error)

    @cached_property
    def _policy(self) -> OrderPolicy:
        """Made when the first costs come: by then a replica that starts again has the order that the run's log names for it."""
        in_use = self._in_use()
        found = self._orders.schedule(in_use)
        self._ready.add(order_key(found))
        return OrderPolicy(self._orders.first, self._rules, self._last_step, found if in_use else None, self._comm)

    def _due(self, now_s: float) -> bool:
        """Whether every rank has measured a step that was not judged yet, and it is time to."""
        calm = not self._changed and now_s < self._judged_s + CALM_S
        rests_s = (_REST_CHANGED if self._changed else _REST) * self._answer_took_s
        if self._rehearsed is False or calm or now_s < self._answered_s + rests_s or len(self._heard) < self._ranks:
            return False
        return min(self._heard.values()) > self._judged

    def _judge(self) -> None:
        self._judged, self._judged_s, self._changed = min(self._heard.values()), time.monotonic(), False
        measured = self._estimates()
        if measured is None or measured.lacking():
            return
        if self._rehearsed is None:
            self._rehearsed = False
            self._prepare(self._in_use(), True)
            return
        observed = CostEstimate(measured.costs(base=self._base), measured.spread(base=self._base))
        decision = self._policy.observed(self._done.step, observed)
        if isinstance(decision, Ask):
            self._record.write(Kind.REPLAN, step=self._done.step, why=decision.why)
            begin_s = time.monotonic()
            answer = self._planner.ask(decision.question)
            self._answered_s = time.monotonic()
            self._answer_took_s = self._answered_s - begin_s
            if isinstance(answer, Answer):
                decision = self._policy.answered(self._done.step, answer)
            else:
                self._policy.unanswered()
                if answer is not None:
                    self._say(f"the schedule's order stays as it is: {answer}")
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        if not isinstance(decision, Switch):
            return
        try:
            self._orders.book.put(decision.order)
        except (Retryable, OSError) as error:
            self._policy.postpone()
            self._say(f"the order {decision.key} of the schedule cannot be stored now: {error}")
            return
        self._pending = decision
        self._record.write(
            Kind.ORDER,
            step=self._done.step,
            order=decision.key,
            before=self._policy.in_use,
            why=decision.why,
            present_ms=decision.present_ms,
            predicted_ms=decision.predicted_ms,
        )
        self._say(
            f"the schedule's order becomes {decision.key}: {decision.why}; predicted {decision.present_ms:.4g} ms a step "
            f"before and {decision.predicted_ms:.4g} ms after"
        )
        self._prepare("" if decision.key == self._first else decision.key, False)

    def _prepared(self, news: _Prepared) -> None:
        if not self._rehearsed:
            self._rehearsed = True
            if news.failed:
                self._say(f"what a change of the schedule's order costs is not known: {news.failed}")
            else:
                self._policy.rehearsed(news.seconds * 1e3)
            self._record.write(Kind.ORDER_REHEARSED, step=self._done.step, seconds=news.seconds, failed=news.failed)
            return
        switch, self._pending = self._pending, None
        assert switch is not None, f"nobody asked for the order {news.order}"
        self._record.write(Kind.ORDER_READY, step=self._done.step, order=switch.key, seconds=news.seconds, failed=news.failed)
        if news.failed:
            self._policy.refuse(switch.key, news.seconds * 1e3)
            self._say(f"the order {switch.key} of the schedule is not used: {news.failed}")
            return
        self._policy.switched(self._done.step, switch.key, 0.0 if switch.key in self._ready else news.seconds * 1e3)
        self._ready.add(switch.key)
        before = [ms for step, ms in self._took_ms if step >= self._changed_at]  # steps before the costs changed were others
        self._gain = (switch, statistics.median(before)) if before else None
        self._took_ms.clear()

    def _count(self, done: _StepDone) -> None:
        """The time of a step; and what the last switch has brought, when enough steps were measured after it."""
        self._took_ms.append((done.step, (done.at_s - self._done.at_s) * 1e3))
        self._done = done
        if self._gain is None or len(self._took_ms) < _GAIN_STEPS:
            return
        (switch, before_ms), self._gain = self._gain, None
        after_ms = statistics.median([ms for _, ms in self._took_ms][1:])  # the first one began before the switch
        self._record.write(
            Kind.ORDER_GAIN,
            step=done.step,
            order=switch.key,
            before_ms=before_ms,
            after_ms=after_ms,
            predicted_ms=switch.gain_ms,
        )
