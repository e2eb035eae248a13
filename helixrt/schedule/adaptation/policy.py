"""When a running job changes the order of its schedule: a policy with hysteresis, without I/O and without a clock.

In: what was measured at each step boundary (`CostEstimate`), answers of the planner (`judge.Answer`), switches that were made
or have failed. Out: a `Decision`: stay, ask the planner, or switch to an order, with the gain that is predicted. The same
inputs give the same decisions. After ADAPTRA section 6, whose profiler tells the scheduler of slow links; what the paper
leaves open:

- The planner is asked when a cost has left its band: it differs from what the newest answer was about by more than noise.
- A switch must pay. Its gain per step, at the end of the measured spread where it is least, times the steps that the present
  condition is expected to last, must exceed what making the order ready costs. A condition is expected to last as long as the
  conditions before it did (their median), and then as long as it has lasted already; the first one to the end of the run.
- What a switch costs is known before the first one: the ranks make the order in use ready once more, and one and a half times
  that time is counted until a switch was made.
- After a switch the order stays for `dwell` steps, twice as many after each switch that follows another one closely.
- An order that was used under costs like the present ones is taken up again as soon as it loses nothing. So is the first order
  where nobody knows what it was chosen for: a replica that starts again has not seen those costs, nor has a run that was slow
  from its beginning.
- The loss is bounded. The policy keeps an account of the time lost against the order that the run began with: switches, and
  steps by another order where that one would have been faster. Beyond `loss_share` of the run's time it goes back to the
  first order, and leaves that only for what the account can bear.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.judge import Answer, CostEstimate, Question, Timed
from helixrt.schedule.costs import Costs
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.ir import Pair, Schedule
from helixrt.schedule.simulate import DELEGATED, Comm

_KNOWN = 6  # orders that are kept beside the first one
_SPELLS = 5  # past conditions that say how long one lasts
_ENDLESS = 1000  # steps that a run without a last one is taken to have left
_MOST_DOUBLINGS = 10
_ALIKE = 3.0  # bands within which costs are like those for which an order was chosen
_SLIVER = 1e-9
_REHEARSED = 1.5  # times as long as its rehearsal a switch is taken to last: it asks the store for the order, too


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How readily a run changes its order.

    Raises ConfigError for values out of their range.
    """

    least_gain: float = 0.02
    """The share of a step's time that another order must save."""
    band: float = 0.1
    """A cost that changes by less than this share of a stage's longest forward and backward counts as unchanged."""
    spreads: float = 3.0
    """A cost that changes by less than so many spreads of the measurement counts as unchanged."""
    payback: float = 1.5
    """The expected gain must be so many times what the switch costs."""
    dwell: int = 3
    """The least number of steps between two switches."""
    loss_share: float = 0.02
    """The share of the run's time that may be lost against the first order before the run returns to it."""
    switch_ms: float = 500.0
    """The assumed cost of making an order ready, until it has been measured."""
    effort: float = 0.1
    """How long the planner searches, relative to its default."""
    memory: float = 0.0
    """How many activations a stage may hold, 1 per micro-batch of all its layers; 0: no cap."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1 if field.name in ("dwell", "payback") else 0
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise ConfigError(f"schedule.adaptation.{field.name}", value, f"must be a number, at least {least}")


@dataclass(frozen=True, slots=True)
class Stay:
    """Go on with the order in use."""

    why: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Have the planner answer this; the answer is for a later step boundary."""

    question: Question
    why: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Make this order ready on all ranks, and use it from then on. Times in ms per step, by the exact simulation under the
    measured costs: of the order in use, and of this one."""

    key: str
    order: Schedule
    present_ms: float
    predicted_ms: float
    why: str

    @property
    def gain_ms(self) -> float:
        return self.present_ms - self.predicted_ms


Decision = Stay | Ask | Switch


@dataclass(frozen=True)
class _Known:
    """An order that was used, or is in use, and the costs for which it was chosen."""

    order: Schedule
    chosen_for: CostEstimate | None  # None: before anything was measured


class OrderPolicy:
    """Of one replica. `first`: the order that the run begins with; `in_use`: that of now, where it is another one (a replica
    that starts again). `last_step` is the number of the run's last step, 0 for none."""

    def __init__(
        self, first: Schedule, rules: Adaptation, last_step: int, in_use: Schedule | None = None, comm: Comm = DELEGATED
    ) -> None:
        self.rules, self.last_step, self.comm = rules, last_step, comm
        self.first = order_key(first)
        self.known: dict[str, _Known] = {self.first: _Known(first, None)}
        self.in_use = self.first
        if in_use is not None and order_key(in_use) != self.first:
            self.in_use = order_key(in_use)
            self.known[self.in_use] = _Known(in_use, None)
        self.refused: set[str] = set()  # orders that some rank could not make ready
        self.lost_ms = 0.0  # against the first order; negative: won
        self.switches = 0
        self._switch_ms = rules.switch_ms  # what making an order ready costs, as far as that is known
        self._answer: Answer | None = None
        self._asked: CostEstimate | None = None  # what the question under way is about
        self._asked_at = 0
        self._counted: int | None = None  # the newest step that is in the account, which begins with the first that is observed
        self._unjudged = 0  # steps under costs that no answer is about yet
        self._changed_at = 0  # when the present condition began
        self._spells: list[int] = []  # how many steps the newest conditions before it lasted
        self._switched_at, self._doublings = -math.inf, 0
        self._switching = False  # a switch was decided, and is neither made nor refused

    @property
    def dwell(self) -> int:
        """Steps between two switches, as of now."""
        return self.rules.dwell << self._doublings

    # ---------------------------------------------------------------- events

    def observed(self, step: int, now: CostEstimate) -> Decision:
        """`step` steps are done, and this was measured; several calls may come within a step. Raises ConfigError for costs of
        another placement."""
        if now.costs.placement != self.known[self.first].order.placement:
            raise ConfigError("costs.placement", now.costs.placement, "must be that of the order in use")
        answer = self._answer
        change = "first costs" if answer is None else differs(answer.observed, now, self.rules)
        steps, self._counted = 0 if self._counted is None else max(0, step - self._counted), step
        if self._asked is not None or change is not None:
            self._unjudged += steps
        else:
            self._account(steps)
        if self._asked is not None or self._switching:
            return Stay("the planner is asked" if self._asked is not None else "the order is made ready")
        if change is None:
            assert answer is not None
            return self._decide(step, answer)
        self._asked, self._asked_at = now, step
        known = tuple(each.order for key, each in self.known.items() if key != self.in_use)
        before = None if answer is None else answer.observed.costs
        rules, in_use = self.rules, self.known[self.in_use].order
        return Ask(Question(now, in_use, known, before, self.comm, rules.least_gain, rules.effort), change)

    def answered(self, step: int, answer: Answer) -> Decision:
        """The planner's answer to the question under way; `step` steps are done."""
        if self._asked is None or answer.observed != self._asked:
            return Stay("the answer is to no question under way")
        if self._answer is not None and any(self._slower(answer.of(key)) for key in (self.in_use, self.first)):
            self._spells = [*self._spells, self._asked_at - self._changed_at][-_SPELLS:]
            self._changed_at = self._asked_at
        self._asked, self._answer = None, answer
        waited, self._unjudged = self._unjudged, 0
        self._account(waited)
        return self._decide(step, answer)

    def unanswered(self) -> None:
        """The planner has failed: the question is asked again when costs say so."""
        self._asked = None

    def rehearsed(self, took_ms: float) -> None:
        """Making the order in use ready once more took the replica's slowest rank so long; before the first switch."""
        self._switch_ms = _REHEARSED * took_ms

    def switched(self, step: int, key: str, took_ms: float) -> None:
        """All steps after `step` are by this order; making it ready took so long (0: it was ready)."""
        assert key in self.known, f"{key} was not decided on"
        close = step - self._switched_at < 10 * self.dwell
        self._doublings = min(_MOST_DOUBLINGS, self._doublings + 1) if close else max(0, self._doublings - 1)
        self._switched_at, self._switching, self.in_use = step, False, key
        self.switches += 1
        self.lost_ms += took_ms
        if took_ms > 0:
            self._switch_ms = took_ms

    def postpone(self) -> None:
        """The switch that was decided cannot be made now: it is decided again."""
        self._switching = False

    def refuse(self, key: str, took_ms: float) -> None:
        """Some rank could not make this order ready: it is never proposed again."""
        self.refused.add(key)
        if key != self.first:  # against which losses are counted
            self.known.pop(key, None)
        self._switching = False
        self.lost_ms += took_ms

    # ---------------------------------------------------------------- account

    def _account(self, steps: int) -> None:
        """So many steps were done by the order in use, under the costs of the newest answer."""
        if self._answer is None or self.in_use == self.first:
            return
        mine, first = self._answer.of(self.in_use), self._answer.of(self.first)
        if mine is not None and first is not None:
            self.lost_ms += steps * (mine.middle_ms - first.middle_ms)

    def _allowed_ms(self, step: int, first: Timed) -> float:
        """What may be lost in all against the first order."""
        steps = self.last_step or step + _ENDLESS
        return self.rules.loss_share * steps * min(first.middle_ms, first.before_ms)

    def _horizon(self, step: int) -> float:
        """How many more steps the present condition is expected to last."""
        left, age = (self.last_step or step + _ENDLESS) - step, step - self._changed_at
        usual = statistics.median(self._spells) if self._spells else math.inf
        return max(0.0, min(left, usual - age if age < usual else age))

    def _slower(self, timed: Timed | None) -> bool:
        """Whether this order takes another time than under the costs of before: the condition is another one."""
        return timed is not None and abs(timed.middle_ms - timed.before_ms) > self.rules.least_gain * timed.before_ms

    # ---------------------------------------------------------------- decision

    def _decide(self, step: int, answer: Answer) -> Decision:
        """Of the orders that were timed under costs like the present ones: stay, or take up another one."""
        present, first = answer.of(self.in_use), answer.of(self.first)
        if present is None:
            return Stay("the order in use was not timed under these costs")
        allowed_ms = self._allowed_ms(step, first or present)
        if present is not first and first is not None and self.lost_ms > allowed_ms and self.first not in self.refused:
            return self._switch(present, first, answer, "more was lost than allowed")
        if step - self._switched_at < self.dwell:
            return Stay(f"the order was changed less than {self.dwell} steps ago")
        familiar = self._familiar(answer, present)
        if familiar is not None and self._bears(familiar, first, 0.0, allowed_ms):
            return self._switch(present, familiar, answer, "the order of before, for costs like those of then")
        others = [each for each in answer.timed if each is not present and each.key not in self.refused]
        # Of equally good ones that which does best when the condition of before comes back, then one that is ready.
        best = min(others, key=lambda o: (round(o.middle_ms, 6), o.before_ms, o.key not in self.known), default=present)
        gain_ms = present.gain_ms(best)
        if gain_ms <= 0 or gain_ms < self.rules.least_gain * present.middle_ms * (1 - _SLIVER):
            self.known[present.key] = _Known(present.order, answer.observed)
            return Stay("no other order saves enough")
        costs_ms, horizon = self._making_ms(best), self._horizon(step)
        if gain_ms * horizon < self.rules.payback * costs_ms:
            return Stay(f"{gain_ms:.3g} ms a step for {horizon:.0f} steps do not pay for {costs_ms:.3g} ms")
        if not self._bears(best, first, costs_ms, allowed_ms):
            return Stay("the account of losses does not bear another switch")
        why = "faster under the measured costs" if answer.by_equation else "links are slower than the order tolerates"
        return self._switch(present, best, answer, why)

    def _making_ms(self, to: Timed) -> float:
        """What making this order ready costs. A rehearsal weaves no graphs for pairs, so with pairs it is not believed."""
        if to.key in self.known:
            return 0.0
        pairs = any(isinstance(entry, Pair) for entries in to.order.entries for entry in entries)
        return max(self._switch_ms, self.rules.switch_ms) if pairs and not self.switches else self._switch_ms

    def _bears(self, to: Timed, first: Timed | None, costs_ms: float, allowed_ms: float) -> bool:
        """Whether no more than allowed is lost if the costs of before come back as soon as this order is taken up."""
        if first is None or to is first:
            return True
        exposed_ms = 2 * self.dwell * max(0.0, to.before_ms - first.before_ms)
        return self.lost_ms + costs_ms + exposed_ms <= allowed_ms

    def _familiar(self, answer: Answer, present: Timed) -> Timed | None:
        """An order that was chosen for costs like the present ones and loses nothing, unless the one in use was chosen so. The
        first one counts as chosen for any, until it is known for which."""

        def alike(key: str) -> bool:
            then = self.known[key].chosen_for
            return then is not None and differs(then, answer.observed, self.rules, _ALIKE) is None

        if alike(self.in_use):
            return None
        for key in reversed(self.known):
            timed = answer.of(key)
            unknown = key == self.first and self.known[key].chosen_for is None
            if key == self.in_use or key in self.refused or timed is None or not (unknown or alike(key)):
                continue
            # The first order is what losses are counted against, so for it rounding and noise count less.
            loss_ms = (self.rules.least_gain / 4 if key == self.first else _SLIVER) * present.middle_ms
            if timed.middle_ms <= present.middle_ms + loss_ms:
                return timed
        return None

    def _switch(self, present: Timed, to: Timed, answer: Answer, why: str) -> Switch:
        self.known.pop(to.key, None)
        self.known[to.key] = _Known(to.order, answer.observed)  # the newest
        spare = [key for key in self.known if key not in (self.first, self.in_use, to.key)]
        for key in spare[: max(0, len(self.known) - _KNOWN)]:
            del self.known[key]
        self._switching = True
        return Switch(to.key, to.order, present.middle_ms, to.middle_ms, why)


def differs(then: CostEstimate, now: CostEstimate, rules: Adaptation, bands: float = 1.0) -> str | None:
    """The first cost that differs by more than so many bands and the noise of both, as text; None if none does."""
    least_ms = bands * rules.band * then.costs.turn_ms
    ways = sorted({*then.costs.links, *now.costs.links})
    columns = (_values(costs, ways) for costs in (then.costs, then.spread, now.costs, now.spread))
    for (name, was_ms), (_, was_spread_ms), (_, is_ms), (_, spread_ms) in zip(*columns, strict=True):
        if abs(is_ms - was_ms) > max(least_ms, rules.spreads * math.hypot(spread_ms, was_spread_ms)):
            return f"{name} went from {was_ms:.3g} to {is_ms:.3g} ms"
    return None


def _values(costs: Costs, ways: Sequence[tuple[int, int]]) -> Iterator[tuple[str, float]]:
    """What is compared, by name."""
    for name, values in (("F", costs.forward), ("B", costs.backward), ("W", costs.weight)):
        for chunk, value in enumerate(values):
            yield f"{name} of chunk {chunk}", value
    for a, b in ways:
        link = costs.link(a, b)
        yield f"a message from stage {a} to {b}", link.delay_ms + link.wire_ms
