"""A simulated world for the link: two ends, rails that fail, and callers that send, wait, stop waiting and release messages.

In: a seed, which decides everything. Out: a `Verdict`, or a `Violation` with the broken rule and the one line
that replays it (`python -m helixrt.emulate.link_world --seed N --text` writes the run out, message by message).

Every message arrives exactly once, whole, in memory that its owner still lends; or the link ends with `Lost`, and it may
do so only when the peer died or no rail was left. In the end every rail that works is in use again, and nothing is
unacknowledged. Nothing hangs: each world has a virtual deadline. `path_world` is the same with rails that are paths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from helixrt.emulate.link_end import End
from helixrt.emulate.link_network import CAPACITIES_BYTES, LONG_BYTES, Network
from helixrt.emulate.seeded import check, replayable
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.rails import ReceiveState, SendState
from helixrt.transport.contract import Lost, PeerAborted

OPTIONS = LinkOptions(
    eager_bytes=LONG_BYTES, eager_memory_bytes=4000, window_bytes=12_000, window_frames=6, attempt_s=2.0, longest_rest_s=0.4
)
GENERATION, END_S = 7, 60.0
EXCUSED_S = 1.0  # a living peer is not lost for being stopped so long; where kernels acknowledge for it, for no time


@dataclass(frozen=True)
class Verdict:
    """What a run did, both ends together."""

    seed: int
    virtual_s: float
    events: int
    received: int
    failovers: int
    failbacks: int
    resent: int
    duplicates: int
    failed: int  # messages, alone
    lost: int  # links
    refused: int  # attempts to restore a rail that failed while the peer carried out what asked for them
    blocked: int  # writes that a full connection turned away


class LinkWorld(Network):
    module = "helixrt.emulate.link_world"
    lengths: Sequence[int] = (0, 10, 900, LONG_BYTES, LONG_BYTES + 1, 5000)
    spans_s: Sequence[float] = (0.05, 0.5, 3.0)  # in which everything begins
    capacities_bytes: Sequence[int] = CAPACITIES_BYTES
    lasting = 1.0  # how long faults last, in relation
    # Shares of the worlds in which kernels acknowledge for a stopped process, one is stopped, an operation is forgotten.
    share_with_kernels, share_with_stops, share_with_forgets = 0.5, 0.2, 0.1
    stops_s: Sequence[float] = (0.3, EXCUSED_S, 4.0)

    def __init__(self, seed: int, trace: bool = False) -> None:
        rng = random.Random(seed)
        super().__init__(rng, self.draw_rails(rng), trace)
        self.seed = seed
        self.options = self.draw_options(rng)
        drivers = random.Random(f"{seed} drivers")
        keep_bytes = drivers.choice((0, self.options.eager_bytes // 2, self.options.eager_bytes))
        self.options = replace(self.options, batched=drivers.random() < 0.5, keep_bytes=keep_bytes)
        # A generator of its own, so that the other draws of a world do not depend on it.
        self.kernels = random.Random(f"{seed} kernels").random() < self.share_with_kernels
        if self.kernels:
            self.options = replace(self.options, attempt_s=6.0)  # more than a process is ever stopped
        self.ends = [self.make_end(me) for me in range(2)]
        self.capacity_bytes = rng.choice(self.capacities_bytes)
        self.draw_weather(rng)
        plain = not (self.options.striped or self.reorders or self.doubles or self.loses)
        self.ordered = plain  # as long as no rail stops delivering
        self.excused = not self.safe  # Lost may be said
        self.killed = False

    # ---- what a world is like

    def draw_rails(self, rng: random.Random) -> int:
        return rng.choice((1, 2, 2, 3))

    def draw_options(self, rng: random.Random) -> LinkOptions:
        return replace(OPTIONS, striped=rng.random() < 0.6)

    def make_end(self, me: int) -> End:
        return End(self, me, Link(GENERATION, 1 - me, self.rails, self.options))

    def draw_weather(self, rng: random.Random) -> None:
        self.reorders, self.doubles = rng.random() < 0.4, rng.choice((0.0, 0.0, 0.1))
        self.loses = rng.choice((0.0, 0.0, 0.0, 0.02))
        self.safe = rng.random() < 0.5 and self.rails > 1  # the last rail never fails

    # ---- running

    def run(self) -> Verdict:
        """To the end; raises Violation when a promise is broken, the machine finds itself misused or nothing ends."""
        with replayable(self.module, self.seed, lambda: f"; at t={self.now:.4f}", " --text"):
            until = self.random.choice(self.spans_s)
            self.meet()
            self.traffic(until)
            self.trouble(until)
            while self.step(END_S):
                if self.now > 2 * until + self.lasting and self.done():
                    break
            self.judge()
        return self.verdict()

    def traffic(self, until: float) -> None:
        for end in self.ends:
            for op in range(self.random.randint(1, 3)):
                for index in range(self.random.randint(1, 5)):
                    self.message(end, self.ends[1 - end.me], op, index, until)
        if self.random.random() < self.share_with_forgets:
            self.at(self.random.uniform(0, until), self.random.choice(self.ends).forget, 0)

    def message(self, sender: End, receiver: End, op: int, index: int, until: float) -> None:
        rng = self.random
        length = rng.choice(self.lengths)
        deadlines = [rng.uniform(0, until + 1) if rng.random() < 0.05 else math.inf for _ in range(2)]
        submit = m.Submit(op, index, length, rng.random() < 0.85, deadlines[0])
        self.at(rng.uniform(0, until), sender.submit, submit)
        self.at(rng.uniform(0, until), receiver.post, m.Post(op, index, length, deadlines[1]), rng.random() < 0.4)

    def trouble(self, until: float) -> None:
        rng = self.random
        for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
            self.fault(until)
        if rng.random() < self.share_with_stops:
            seconds = rng.choice(self.stops_s)
            self.excused |= seconds > EXCUSED_S and not self.kernels
            self.at(rng.uniform(0, until), self.stop, rng.randrange(2), seconds)
        if rng.random() < 0.05:
            self.killed = self.excused = True
            self.at(rng.uniform(0, until), self.kill, rng.randrange(2))

    def fault(self, until: float) -> None:
        rng, when = self.random, self.random.uniform(0, until)
        rails = self.draw_victims(rng)
        kind = rng.random()
        if kind < 0.5:
            self.on_each(rails, when, self.cut)
        elif kind < 0.65:
            self.on_each(rails, when, self.set_cable, False)
            back = when + self.lasting * rng.uniform(0.1, 1.5)
            self.on_each(rails, back, self.set_cable, True)
            self.hint(rails, back)
        elif kind < 0.85:
            me, self.ordered = rng.randrange(2), False
            self.on_each(rails, when, self.set_mute, me, True)
            self.on_each(rails, when + self.lasting * rng.uniform(0.1, 3.0), self.set_mute, me, False)
        else:
            self.on_each(rails, when, rng.choice(self.ends).slow)

    def hint(self, rails: Sequence[int], back: float) -> None:
        """RailMended events for some ends, some of them too early. The other draws of a world stay what they are."""
        draw = random.Random(f"{self.seed} {back}")
        for end in self.ends:
            for off in draw.choice(((), (0.001,), (-0.02, 0.005))):
                self.on_each(rails, max(0.0, back + off), end.mended)

    def draw_victims(self, rng: random.Random) -> Sequence[int]:
        """The rails that a fault strikes."""
        return [rng.randrange(self.rails - 1 if self.safe else self.rails)]

    def on_each(self, rails: Sequence[int], when: float, what: Any, *more: Any) -> None:
        for rail in rails:
            self.at(when, what, rail, *more)

    # ---- judgement

    def done(self) -> bool:
        alone = any(end.dead for end in self.ends)
        return all(end.dead or end.ended or not (alone or self.waits(end)) for end in self.ends)

    def waits(self, end: End) -> list[str]:
        """What `end` still waits for."""
        peer = self.ends[1 - end.me]
        over = end.forgotten | peer.forgotten
        waits = []
        for name in end.submitted:
            given_up = name[0] in over or (name, True) in end.failures or (name, False) in peer.failures
            if name not in end.sent and not given_up:
                waits.append(f"{end.me} has not Sent {name}")
        for name in end.lent:
            if name[0] not in over and (name, True) not in peer.failures:
                waits.append(f"{end.me} has not Received {name}")
        if any(rail.send is not SendState.DEFAULT or rail.receive is not ReceiveState.DEFAULT for rail in end.link.rails):
            waits.append(f"{end.me}: rails {[(rail.send.value, rail.receive.value) for rail in end.link.rails]} are not back")
        if end.link._outbox.flights:
            waits.append(f"{end.me}: {len(end.link._outbox.flights)} frames are not acknowledged")
        return waits

    def judge(self) -> None:
        for end in self.ends:
            if end.dead:
                continue
            end.judge()
            if end.ended is None:
                check(not self.killed, f"{end.me} did not notice that its peer died")
                if not self.ends[1 - end.me].ended:
                    waits = self.waits(end)
                    check(not waits, "; ".join(waits))
            else:
                check(self.excused, f"{end.me} ended with {end.ended} while a rail was sound")
                check(end.failure is not m.Failure.PROGRAM, f"{end.ended}")
                told = isinstance(end.ended, PeerAborted)
                cause = not told or isinstance(self.ends[1 - end.me].ended, Lost)
                check(cause, f"{end.me} ended with {end.ended}: no abort was sent to it")

    def verdict(self) -> Verdict:
        return Verdict(**self.findings())

    def findings(self) -> dict[str, Any]:
        links = [end.link for end in self.ends]
        return dict(
            seed=self.seed,
            virtual_s=self.now,
            events=self.events,
            received=sum(len(end.received) for end in self.ends),
            failovers=sum(link.failovers for link in links),
            failbacks=sum(link.failbacks for link in links),
            resent=sum(link.resent for link in links),
            duplicates=sum(link.duplicates for link in links),
            failed=sum(len(end.failures) for end in self.ends),
            lost=sum(end.ended is not None for end in self.ends),
            refused=self.refusals,
            blocked=sum(sock.turned_away for sock in self.sockets),
        )


def main(arguments: Sequence[str] | None = None, world: type[LinkWorld] = LinkWorld) -> None:
    """`--seed N [--count M]`: run one seed, or M seeds from N on, and print what happened; `--text`: message by message."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--text", action="store_true")
    options = parser.parse_args(arguments)
    for seed in range(options.seed, options.seed + options.count):
        run = world(seed, options.text)
        try:
            print(run.run())
        finally:
            print(*(run.trace or ()), sep="\n", end="\n" if run.trace else "")


if __name__ == "__main__":
    main()
