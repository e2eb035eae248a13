"""Path hopping: new messages leave a congested path for a better one, by measured RTT (Hopper, sections 3.1 to 3.3).

    policy = Hopper(paths, options, random.Random(seed))
    actions = policy.on(event, now)        # hopping_messages.py; `policy.path` is where new messages go

In: RTTs of messages and probes, what is under way, time. Out: `Probe` and `Switch`. No clock, no randomness but the
generator it is given. The rules, all numbers options (Table 1 of the paper):

    average     of the RTTs of the path in use, the newest with weight alpha; a path begins with the base RTT
    epoch       as long as the RTT that began it; at most one decision in each, and one round of probes as long as it is
                remembered
    probe       average above 1.5 base: two random paths, of those not probed within the time-to-live
    switch      average above 2.5 base: to the best path known, if that has at most 0.8 of the average
    neither     both are remembered for the time-to-live, and nothing is probed for an epoch
    delay       with `delayed`: the old path's RTT, continued in a straight line to what is under way on it, less the
                new one's

Where the paper gives no rule, or measures what we cannot:

- A message without acknowledgement counts, too: the average is judged as if it ended now (`Pending`), so that one on a
  ten times slower path is not waited for.
- After a switch there is none for a time-to-live, and the path that was left counts as probed. So switches are at
  most 1/(remember x base) a second whatever the RTTs do, and noise on equal paths cannot make a flow oscillate.
- Before the first message three paths are looked at (`look_first`): two random choices are worth most where nothing is
  known yet, and cost a probe's RTT, against ten base RTTs when the drawn path is ten times slower. If all look
  congested, as they do when it was this machine that stalled, once or twice more. Senders that begin together, as those of
  a collective do, look at random times within that of four probes (`look_within`): who looks a probe later sees what
  others chose. In simulated rounds of the paper's testbed p99 falls from 3.2 to 2.2 so, and a wider window gives nothing more.
- A path that neither a probe nor a message has shown to be fast is given one message at a time (`proven`). If a probe said
  that it is slow, and it was the best there was, its first message is judged by its own age, without the average.
- An answer as fast as an idle path's ends the wait for the other one, which cannot be better.
- What is known of a path counts for the time-to-live, though its probe is of an earlier epoch; a probe that takes
  longer than a message on the path in use is one that failed.
- A receiver that takes messages in any order, as our links do, has no use for the delay.

Kept per path: nothing beyond the time-to-live. Kept for the path in use: the average.
"""

from __future__ import annotations

import math
import random

from helixrt.protocol.hopping import messages as h
from helixrt.protocol.hopping.messages import Action, Event, HoppingOptions, Reason

LOOKS = 3  # before the first message, at the most, until a path looks uncongested


class RttAverage:
    """The moving average of one path's RTT, and its epochs."""

    def __init__(self, options: HoppingOptions) -> None:
        self._alpha, self._base_s = options.alpha, options.base_s
        self.value_s = self._base_s
        self._ends_s = -math.inf
        self._epoch: list[float] = []  # RTTs

    def restart(self) -> None:
        """Another path."""
        self.value_s, self._ends_s, self._epoch = self._base_s, -math.inf, []

    def look(self, rtt_s: float, now: float) -> bool:
        """Whether a new epoch begins now, with a message that took or has taken `rtt_s`."""
        if now < self._ends_s:
            return False
        self._ends_s, self._epoch = now + rtt_s, []
        return True

    def take(self, rtt_s: float) -> None:
        self._epoch.append(rtt_s)
        self.value_s = self.with_one_of(rtt_s)

    def with_one_of(self, rtt_s: float) -> float:
        """What the average would be with one more."""
        return self._alpha * rtt_s + (1 - self._alpha) * self.value_s

    def reached_by(self, threshold_s: float) -> float:
        """The RTT of one more message that would lift the average to the threshold; at least the base RTT."""
        return max(self._base_s, (threshold_s - (1 - self._alpha) * self.value_s) / self._alpha)

    def predicted(self, ahead: int) -> float:
        """The RTT of the message that is `ahead` behind the last one measured, on the line through this epoch's RTTs.

        Never falling: queues that stop to grow are not known to shrink, so it is an upper bound (section 3.3).
        """
        count = len(self._epoch)
        last = self._epoch[-1] if self._epoch else self.value_s
        if count < 2:
            return last
        middle, mean = (count - 1) / 2, sum(self._epoch) / count
        rise = sum((i - middle) * (rtt - mean) for i, rtt in enumerate(self._epoch))
        slope = max(0.0, rise / sum((i - middle) ** 2 for i in range(count)))
        return max(last, mean + slope * (count - 1 - middle + ahead))


class Policy:
    """Chooses one of `paths` for new messages; this one draws it and stays as long as it can. `draw` is its own.

    RTTs below the base RTT count as that.
    """

    def __init__(self, paths: int, options: HoppingOptions, draw: random.Random) -> None:
        assert paths > 0
        self.options, self.base_s = options, options.base_s
        self.path = draw.randrange(paths)
        self.looking = False  # messages wait, see `Starting`
        self.proven = True  # else give the path in use one message at a time
        self.switches = 0
        self.average = RttAverage(options)
        self.under_way = [0] * paths
        self._usable = set(range(paths))
        self._draw = draw

    @property
    def deadline(self) -> float:
        """Time of the next `Tick` that it needs; inf: none."""
        return math.inf

    @property
    def patience_s(self) -> float:
        """Tell `Pending` when a message on the path in use is under way for so long, and once per base RTT from then on."""
        return math.inf

    def on(self, event: Event, now: float) -> list[Action]:
        out: list[Action] = []
        match event:
            case h.Begun(path):
                self.under_way[path] += 1
            case h.Ended(path):
                self.under_way[path] = max(0, self.under_way[path] - 1)  # less: of what it had when it was lost
            case h.Measured(path, rtt_s):
                self._measured(path, max(rtt_s, self.base_s), now, out)
            case h.Pending(path, rtt_s):
                self._pending(path, max(rtt_s, self.base_s), now, out)
            case h.PathLost(path):
                self._usable.discard(path)
                self.under_way[path] = 0
                self._forget(path)
                self._leave_lost(now, out)
            case h.PathBack(path):
                self._usable.add(path)
                self._leave_lost(now, out)
            case _:
                self._probing(event, now, out)
        return out

    def _leave_lost(self, now: float, out: list[Action]) -> None:
        """If the path in use is lost, take another as soon as there is one."""
        if self.path not in self._usable and self._usable:
            self._go(self._refuge(now), Reason.LOST, self.average.value_s, 0.0, now, now, out)

    def _go(
        self, path: int, reason: Reason, old_rtt_s: float, rtt_s: float, at_s: float, now: float, out: list[Action]
    ) -> None:
        out.append(h.Switch(self.path, path, at_s, reason, old_rtt_s, rtt_s))
        self.path = path
        self.switches += 1
        self.average.restart()

    def _others(self) -> list[int]:
        return sorted(self._usable - {self.path})

    # ---- what other policies do with it

    def _measured(self, path: int, rtt_s: float, now: float, out: list[Action]) -> None: ...

    def _pending(self, path: int, rtt_s: float, now: float, out: list[Action]) -> None: ...
    def _refuge(self, now: float) -> int:
        """A usable path, the one in use being lost."""
        return self._draw.choice(sorted(self._usable))

    def _forget(self, path: int) -> None:
        """Nothing that was known of a path holds."""

    def _probing(self, event: Event, now: float, out: list[Action]) -> None:
        """`Starting`, `Answered`, `Unanswered`, `Tick`."""


class Hopper(Policy):
    def __init__(self, paths: int, options: HoppingOptions, draw: random.Random) -> None:
        super().__init__(paths, options, draw)
        self.proven = False  # until a message or a probe shows that it is not slow
        self._suspected = False  # a probe said that it is slow, and no message has come back yet
        self._known: dict[int, tuple[float, float]] = {}  # path -> its RTT, and until when that is remembered
        self._asked: set[int] = set()  # probes without an answer
        self._give_up_s = math.inf  # on them
        self._judged_s = 0.0  # the average as it was judged last
        self._round: tuple[int, ...] = ()  # of probes, in this epoch
        self._decided = False  # in this epoch
        self._rest_until_s = -math.inf  # no probes: neither path was better
        self._hold_until_s = -math.inf  # no switch: there was one
        self._started = False
        self._look_s = math.inf  # when to look, before the first message
        self._looks = 0

    @property
    def deadline(self) -> float:
        return min(self._give_up_s, self._look_s)

    @property
    def patience_s(self) -> float:
        enough_s = self.options.probe_above * self.base_s
        return enough_s if self._suspected else self.average.reached_by(enough_s)

    def known(self, now: float) -> dict[int, float]:
        """What is remembered of other paths: path -> RTT; inf: it did not answer."""
        self._known = {path: one for path, one in self._known.items() if now < one[1]}
        return {path: rtt_s for path, (rtt_s, _) in self._known.items()}

    # ---- congestion (section 3.1)

    def _measured(self, path: int, rtt_s: float, now: float, out: list[Action]) -> None:
        if path != self.path:
            self._remember(path, rtt_s, now)
            return
        self.proven, self._suspected = True, False
        self._look(rtt_s, now)
        self.average.take(rtt_s)
        self._judge(self.average.value_s, now, out)

    def _pending(self, path: int, rtt_s: float, now: float, out: list[Action]) -> None:
        if path != self.path:
            self._remember(path, max(rtt_s, self.known(now).get(path, 0.0)), now)
            return
        self._look(rtt_s, now)
        average_s = max(self.average.value_s, self.average.with_one_of(rtt_s))
        self._judge(max(average_s, rtt_s) if self._suspected else average_s, now, out)

    def _look(self, rtt_s: float, now: float) -> None:
        if self.average.look(rtt_s, now):
            self._round, self._decided = (), False

    def _judge(self, average_s: float, now: float, out: list[Action]) -> None:
        self._judged_s = average_s
        if self.looking:
            return
        if average_s > self.options.probe_above * self.base_s:
            self._probe(now, out)
        if average_s > self.options.switch_above * self.base_s:
            self._decide(now, out)

    # ---- probes (section 3.2)

    def _probe(self, now: float, out: list[Action]) -> None:
        explored = self.known(now)
        if self._asked or now < self._rest_until_s or not explored.keys().isdisjoint(self._round):
            return
        unexplored = [path for path in self._others() if path not in explored]
        if unexplored:
            self._round = self._drawn(unexplored)
            self._ask(self._round, now + self._judged_s, out)

    def _drawn(self, paths: list[int]) -> tuple[int, ...]:
        return tuple(self._draw.sample(paths, min(self.options.choices, len(paths))))

    def _ask(self, paths: tuple[int, ...], give_up_s: float, out: list[Action]) -> None:
        self._asked, self._give_up_s = set(paths), give_up_s
        out.append(h.Probe(paths))

    def _probing(self, event: Event, now: float, out: list[Action]) -> None:
        match event:
            case h.Starting():
                self._start(now, out)
            case h.Answered(path, rtt_s):
                self._remember(path, max(rtt_s, self.base_s), now)
                idle = path in self._asked and rtt_s <= self.options.probe_above * self.base_s
                self._settled(self._asked if idle else {path}, now, out)
            case h.Unanswered(path):
                self._remember(path, math.inf, now)
                self._settled({path}, now, out)
            case h.Tick():
                if now >= self._look_s:
                    self._look_around(now, out)
                if now >= self._give_up_s:
                    for path in self._asked:
                        self._remember(path, math.inf, now)
                    self._settled(self._asked, now, out)

    def _settled(self, paths: set[int], now: float, out: list[Action]) -> None:
        """Of these paths is known what can be known; when that is so of all, decide."""
        if not self._asked & paths:
            return
        self._asked = self._asked - paths
        if self._asked:
            return
        self._give_up_s = math.inf
        if self.looking:
            self._looked(now, out)
        elif self._judged_s > self.options.switch_above * self.base_s:
            self._decide(now, out)

    # ---- before the first message

    def _start(self, now: float, out: list[Action]) -> None:
        if not self._started and self.options.look_first and self._others():
            self.looking, self._look_s = True, now + self._draw.random() * self.options.look_within_s
            if self._look_s <= now:
                self._look_around(now, out)
        self._started = True

    def _look_around(self, now: float, out: list[Action]) -> None:
        self._looks, self._look_s = self._looks + 1, math.inf
        self._ask((self.path, *self._drawn(self._others())), now + self.base_s, out)

    def _looked(self, now: float, out: list[Action]) -> None:
        enough_s = self.options.switch_above * self.base_s
        known = self.known(now)
        here_s = known.pop(self.path, math.inf)
        best = self._best(known)
        there_s = math.inf if best is None else known[best]
        if min(here_s, there_s) > enough_s and self._looks < LOOKS and self._others():
            self._look_around(now, out)  # all are slow, or we were stalled when they answered
            return
        self.looking, self.proven = False, here_s <= enough_s
        self._suspected = not self.proven
        if best is not None and there_s <= self.options.better * here_s:
            self._go(best, Reason.LOOKED, here_s, there_s, now, now, out)

    def _remember(self, path: int, rtt_s: float, now: float) -> None:
        self._known[path] = (rtt_s, now + self.options.remember * self.base_s)

    def _forget(self, path: int) -> None:
        self._known.pop(path, None)
        self._asked.discard(path)
        if not self._asked:
            self._give_up_s = math.inf
            self.looking = self._look_s < math.inf

    # ---- switches (section 3.3)

    def _decide(self, now: float, out: list[Action]) -> None:
        if self._decided or self._asked or now < self._hold_until_s:
            return
        known = self.known(now)
        if known.keys().isdisjoint(self._others()):
            return  # in an epoch longer than the time-to-live all results expire: that is not "neither is better"
        best, self._decided = self._best(known), True
        if best is not None and known[best] <= self.options.better * self._judged_s:
            rtt_s, at_s = known[best], now
            if self.options.delayed:
                last_s = max(self._judged_s, self.average.predicted(self.under_way[self.path]))
                at_s += max(0.0, last_s - rtt_s)
            self._remember(self.path, self._judged_s, now)
            self._go(best, Reason.CONGESTED, self._judged_s, rtt_s, at_s, now, out)
        elif not known.keys().isdisjoint(self._round):
            self._rest_until_s = now + self._judged_s

    def _best(self, known: dict[int, float]) -> int | None:
        """The usable path with the least RTT; random among equals, so that not all senders select the same one."""
        found = [path for path in self._others() if math.isfinite(known.get(path, math.inf))]
        least = min((known[path] for path in found), default=math.inf)
        return self._draw.choice([path for path in found if known[path] == least]) if found else None

    def _refuge(self, now: float) -> int:
        best = self._best(self.known(now))
        return super()._refuge(now) if best is None else best

    def _go(
        self, path: int, reason: Reason, old_rtt_s: float, rtt_s: float, at_s: float, now: float, out: list[Action]
    ) -> None:
        super()._go(path, reason, old_rtt_s, rtt_s, at_s, now, out)
        self.proven = 0 < rtt_s <= self.options.switch_above * self.base_s
        self._suspected = not self.proven and rtt_s > 0
        self._hold_until_s = now + self.options.remember * self.base_s
        self._round, self._decided = (), False
        self._judged_s = 0.0
