"""Two links joined by rails that delay, reorder, double, lose, fall silent, break and return: thousands of seeds.

Every message arrives exactly once, whole, in memory that its owner still lends; or the link says `Lost`, and it
may say so only when the peer died or no rail was left. Nothing hangs: each world has a virtual deadline.
Mutations break rules of the protocol on purpose; the same worlds must then fail.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from helixrt.protocol import frames, link_send
from helixrt.protocol import link_messages as m
from helixrt.protocol.ledger import Ledger
from helixrt.protocol.link import Link
from helixrt.protocol.link_failover import Failover
from helixrt.protocol.link_rails import Rail, ReceiveState, SendState
from helixrt.protocol.link_receive import Inbox
from helixrt.protocol.link_send import Outbox
from helixrt.protocol.link_wire import Wire

OPTIONS: dict[str, Any] = dict(
    eager_bytes=1000, eager_memory_bytes=4000, window_bytes=12_000, window_frames=6, attempt_s=2.0, longest_rest_s=0.4
)
LENGTHS = (0, 10, 900, 1000, 1001, 5000)
END_S = 60.0

Name = tuple[int, int]


@dataclass
class Connection:
    """One incarnation of a rail; each end may close it or lose it in its own time."""

    rail: int
    incarnation: int
    open: list[bool] = field(default_factory=lambda: [False, False])  # per end: it uses this connection
    joined: list[bool] = field(default_factory=lambda: [False, False])  # it has begun to
    dead: bool = False  # nothing sent from now on arrives
    last: list[float] = field(default_factory=lambda: [0.0, 0.0])  # when the newest frame towards an end arrives
    behind: tuple[deque[frames.Frame], ...] = field(default_factory=lambda: (deque(), deque()))  # cannot be read yet


class Wrong(AssertionError):
    pass


def check(rule: bool, what: str) -> None:
    if not rule:
        raise Wrong(what)


class End:
    """A driver on memory that remembers whose it is, and the caller above it."""

    def __init__(self, world: World, me: int, link: Link) -> None:
        self.world, self.me, self.link = world, me, link
        self.lent: dict[Name, str] = {}  # receive memory: name -> what stands in it
        self.submitted: dict[Name, m.Submit] = {}
        self.sent: set[Name] = set()
        self.received: list[Name] = []
        self.failed: set[tuple[Name, bool]] = set()
        self.forgotten: set[int] = set()
        self.copies: set[Name] = set()
        self.held: dict[Name, str] = {}
        self.landing: dict[int, tuple[int, Name, m.Landing]] = {}  # rail -> sequence, name, where
        self.connections: dict[int, Connection] = {}
        self.ended: m.Lost | m.PeerAborted | m.PeerClosed | None = None
        self.dead = False
        self.next_tick = 0.0
        self.newest = 0  # sequence number that came
        self.stopped_until = 0.0  # its process stands still, and what is for it waits

    def tell(self, event: m.Event) -> None:
        if self.dead:
            return
        actions = self.link.on(event, self.world.now)
        if isinstance(event, m.FrameArrived) and event.frame.kind is frames.Kind.DATA and not self.ended:
            accepts = sum(isinstance(action, m.Accept) for action in actions)
            if accepts != 1 and not self.link.closed:
                raise Wrong(f"{accepts} Accepts for {event}")
        for action in actions:
            self.do(action)
        box = self.link._outbox
        check(self.link._inbox.held_bytes <= OPTIONS["eager_memory_bytes"], "eager memory overrun")
        check(box.bytes <= OPTIONS["window_bytes"] or sum(f.bytes > 0 for f in box.flights.values()) == 1, "window overrun")
        if isinstance(event, m.Tick) and self.ended is None:
            check(self.link.deadline > self.world.now, f"deadline {self.link.deadline} not after the Tick: a busy loop")
        self.schedule_tick()

    def schedule_tick(self) -> None:
        due = self.link.deadline
        if due < END_S and (self.next_tick <= self.world.now or due < self.next_tick):
            self.next_tick = due = max(due, self.world.now)
            self.world.at(due, self.tick)

    def tick(self) -> None:
        if self.dead or self.world.stopped(self.me, self.tick, behind_s=1e-6):  # a Tick comes after all that could be read
            return
        if self.world.now >= self.link.deadline:
            self.tell(m.Tick())
        else:
            self.schedule_tick()

    def do(self, action: m.Action) -> None:
        world = self.world
        world.note(self.me, action)
        match action:
            case m.SendFrame(rail, frame):
                world.transmit(self.me, rail, frame)
            case m.SendData(rail, frame):
                name = (frame.op, frame.index)
                mine = self.submitted[name]
                check(mine.length == frame.length, f"{name} with a wrong length")
                given_back = name in self.sent or mine.op in self.forgotten or (name, True) in self.failed
                check(not given_back or name in self.copies, f"{name} sent from memory that was given back")
                world.sends[self.me, name] = world.sends.get((self.me, name), 0) + 1
                check(mine.repeatable or world.sends[self.me, name] == 1, f"{name} must not be sent twice")
                world.transmit(self.me, rail, frame)
            case m.Keep(op, index):
                self.copies.add((op, index))
            case m.Release(op, index):
                self.copies.remove((op, index))
            case m.Accept(rail, sequence, op, index, landing):
                check(rail not in self.landing, f"Accept on rail {rail} before the last payload's end")
                self.landing[rail] = (sequence, (op, index), landing)
                if landing is m.Landing.PLACE:
                    self.write((op, index), "half")
            case m.Discard(rail):
                sequence, name, landing = self.landing[rail]
                self.landing[rail] = (sequence, name, m.Landing.DROP)
            case m.Deliver(op, index):
                self.write((op, index), self.held.pop((op, index)))
            case m.Free(op, index):
                del self.held[op, index]
            case m.Sent(op, index):
                name = (op, index)
                check(name in self.submitted and name not in self.sent, f"Sent {name} twice")
                if name not in self.copies:
                    whole = name in world.arrived[1 - self.me] or op in world.ends[1 - self.me].forgotten
                    abandoned = (name, False) in world.ends[1 - self.me].failed
                    check(whole or abandoned or not world.tolerant, f"Sent {name}, which has not arrived")
                self.sent.add(name)
            case m.Received(op, index):
                name = (op, index)
                check(name not in self.received, f"Received {name} twice")
                check(self.lent.pop(name) == world.content(1 - self.me, name), f"{name} handed on before it was whole")
                self.received.append(name)
            case m.Failed(op, index, sending, _):
                check(((op, index), sending) not in self.failed, f"Failed {op, index} twice")
                self.failed.add(((op, index), sending))
                if not sending:
                    del self.lent[op, index]
            case m.RestoreRail(rail):
                world.restore(self.me, rail)
            case m.ResetRail(rail):
                world.close(self.me, rail)
            case m.Lost() | m.PeerAborted() | m.PeerClosed():
                check(self.ended is None, "ended twice")
                self.ended = action
            case m.Detach(op, index):
                check((op, index) not in self.sent, "Detach of what was sent")

    def write(self, name: Name, what: str) -> None:
        check(name in self.lent, f"{what!r} written into memory of {name}, which is its owner's again")
        self.lent[name] = what

    def payload(self, rail: int, sequence: int) -> None:
        """The rest of the payload under way came in."""
        number, name, landing = self.landing.pop(rail)
        assert number == sequence
        content = self.world.content(1 - self.me, name)
        if landing is m.Landing.PLACE:
            self.write(name, content)
        elif landing is m.Landing.HOLD:
            self.held[name] = content
        if landing is not m.Landing.DROP:
            self.world.arrived[self.me].add(name)
            check(sequence > self.newest or not self.world.ordered, f"{name}, number {sequence}, after {self.newest}")
            self.newest = sequence
        self.tell(m.PayloadArrived(rail, sequence))


class World:
    def __init__(self, seed: int, log: bool = False) -> None:
        self.random = rng = random.Random(seed)
        self.seed, self.log = seed, log
        self.now, self.queue, self.number = 0.0, [], 0  # type: ignore[var-annotated]
        self.rails = rng.choice((1, 2, 2, 3))
        self.tolerant = True
        options = m.LinkOptions(striped=rng.random() < 0.6, **OPTIONS)
        self.ends = [End(self, me, Link(7, 1 - me, self.rails, options)) for me in range(2)]
        self.arrived: tuple[set[Name], set[Name]] = (set(), set())
        self.sends: dict[tuple[int, Name], int] = {}
        self.incarnations = [0] * self.rails
        self.cable = [True] * self.rails  # a connection can be made, and carries
        self.mute = [[False, False] for _ in range(self.rails)]  # towards an end nothing arrives, and nobody is told
        self.dialing = [False] * self.rails
        self.wanted = [[False, False] for _ in range(self.rails)]
        self.reorders, self.doubles = rng.random() < 0.4, rng.choice((0.0, 0.0, 0.1))
        self.loses = rng.choice((0.0, 0.0, 0.0, 0.02))
        self.ordered = not (options.striped or self.reorders or self.doubles or self.loses)  # and no rail was ever mute
        self.safe = rng.random() < 0.5 and self.rails > 1  # the last rail never fails
        self.excused = not self.safe  # Lost may be said

    # ---- time

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """At the same time, what was asked for first comes first."""
        self.number += 1
        heapq.heappush(self.queue, (when, self.number, what, args))

    def later(self, least: float, most: float, what: Callable[..., None], *args: Any) -> None:
        self.at(self.now + self.random.uniform(least, most), what, *args)

    def stopped(self, me: int, what: Callable[..., None], *args: Any, behind_s: float = 0.0) -> bool:
        """Whether the process of `me` is stopped: then `what` comes when it goes on."""
        until = self.ends[me].stopped_until
        if until <= self.now:
            return False
        self.at(until + behind_s, what, *args)
        return True

    def note(self, end: int, what: object) -> None:
        if self.log:
            print(f"{self.now:9.4f} {end} {what}")

    def content(self, end: int, name: Name) -> str:
        return f"{name} of {end}"

    # ---- rails

    def connect(self, rail: int) -> None:
        if self.stopped(0, self.connect, rail):
            return
        self.dialing[rail] = False
        if not self.cable[rail] or any(end.dead for end in self.ends):
            self.ends[0].tell(m.RailDown(rail, m.Failure.PATH, "cannot connect"))
            return
        self.incarnations[rail] += 1
        connection = Connection(rail, self.incarnations[rail])
        for end in self.ends:
            self.later(0, 0.003, self.connected, end.me, connection)

    def connected(self, me: int, connection: Connection) -> None:
        if self.stopped(me, self.connected, me, connection):
            return
        end = self.ends[me]
        old = end.connections.get(connection.rail)
        if end.dead or (old is not None and old.incarnation > connection.incarnation):
            return
        self.wanted[connection.rail][me] = False
        end.connections[connection.rail] = connection
        end.landing.pop(connection.rail, None)
        connection.open[me] = connection.joined[me] = True
        end.tell(m.RailUp(connection.rail, connection.incarnation))
        self.read_on(me, connection)

    def restore(self, me: int, rail: int) -> None:
        """End 0 dials; end 1 waits."""
        if me == 0 and not self.dialing[rail]:
            self.dialing[rail] = True
            self.later(0.001, 0.02, self.connect, rail)

    def close(self, me: int, rail: int) -> None:
        """`me` closed its end; the other one sees the end of the stream after what is under way, unless the rail is mute."""
        end = self.ends[me]
        connection = end.connections.pop(rail, None)
        end.landing.pop(rail, None)
        if connection is not None and connection.open[me]:
            connection.open[me] = False
            self.at(max(connection.last[1 - me], self.now + 0.001), self.ended, 1 - me, connection, m.Failure.PATH)

    def ended(self, me: int, connection: Connection, failure: m.Failure) -> None:
        if self.stopped(me, self.ended, me, connection, failure):
            return
        end = self.ends[me]
        if not connection.open[me] or end.connections.get(connection.rail) is not connection or self.mute[connection.rail][me]:
            return
        connection.open[me] = False
        del end.connections[connection.rail]
        end.landing.pop(connection.rail, None)
        self.note(me, f"rail {connection.rail} ended: {failure}")
        end.tell(m.RailDown(connection.rail, failure, "end of stream"))

    def transmit(self, me: int, rail: int, frame: frames.Frame) -> None:
        connection = self.ends[me].connections.get(rail)
        if connection is None or not connection.open[me]:
            return
        wire = frames.pack(frame)
        parsed = frames.parse(wire[: frames.HEADER_BYTES])
        if frame.kind is not frames.Kind.DATA:
            parsed = frames.with_body(parsed, wire[frames.HEADER_BYTES :])
        if parsed != frame:
            raise Wrong(f"{frame} came out as {parsed}")
        for _ in range(1 + (self.random.random() < self.doubles)):
            lost = connection.dead or self.random.random() < self.loses
            when = self.now + self.random.uniform(0.0005, 0.02)
            if not self.reorders:
                when = max(when, connection.last[1 - me])
            connection.last[1 - me] = max(when, connection.last[1 - me])
            if not lost:
                self.at(when, self.arrive, 1 - me, connection, frame)

    def arrive(self, me: int, connection: Connection, frame: frames.Frame) -> None:
        if self.stopped(me, self.arrive, me, connection, frame):
            return
        end = self.ends[me]
        rail = connection.rail
        if not connection.joined[me]:
            connection.behind[me].append(frame)
            return
        if end.dead or not connection.open[me] or connection.dead or self.mute[rail][me]:
            return
        if end.connections.get(rail) is not connection:
            return
        if rail in end.landing:
            connection.behind[me].append(frame)
            return
        self.note(me, (rail, "<-", frame))
        end.tell(m.FrameArrived(rail, frame))
        if frame.kind is frames.Kind.DATA and rail in end.landing:
            self.later(0.0, 0.03 if frame.length > 1000 else 0.001, self.payload, me, connection, frame.sequence)

    def payload(self, me: int, connection: Connection, sequence: int) -> None:
        if self.stopped(me, self.payload, me, connection, sequence):
            return
        end = self.ends[me]
        rail = connection.rail
        mine = end.connections.get(rail) is connection and connection.open[me] and not connection.dead
        if not end.dead and mine and not self.mute[rail][me] and end.landing.get(rail, (0,))[0] == sequence:
            end.payload(rail, sequence)
            self.read_on(me, connection)

    def read_on(self, me: int, connection: Connection) -> None:
        while connection.behind[me] and connection.rail not in self.ends[me].landing:
            self.arrive(me, connection, connection.behind[me].popleft())

    # ---- faults

    def cut(self, rail: int) -> None:
        """The connection dies; each end hears of it in its own time, or not at all."""
        connection = self.ends[0].connections.get(rail) or self.ends[1].connections.get(rail)
        if connection is None:
            return
        connection.dead = True
        self.note(2, f"cut rail {rail}")
        failure = self.random.choice((m.Failure.PATH, m.Failure.PATH, m.Failure.DEVICE, m.Failure.CASCADE))
        deaf = self.random.choice((None, None, 0, 1))
        for end in self.ends:
            if end.me != deaf:
                self.later(0, 0.05, self.ended, end.me, connection, failure)

    def set_cable(self, rail: int, works: bool) -> None:
        self.cable[rail] = works
        if not works:
            self.cut(rail)

    def set_mute(self, rail: int, me: int, mute: bool) -> None:
        self.note(2, f"rail {rail} towards {me} mute: {mute}")
        self.mute[rail][me] = mute

    def slow(self, me: int, rail: int) -> None:
        if not self.stopped(me, self.slow, me, rail):
            self.ends[me].tell(m.RailSlow(rail))

    def stop(self, me: int, seconds: float) -> None:
        self.note(2, f"stop {me} for {seconds}")
        self.ends[me].stopped_until = self.now + seconds

    def kill(self, me: int) -> None:
        self.note(2, f"kill {me}")
        self.ends[me].dead = True
        survivor = self.ends[1 - me]
        for rail in range(self.rails):
            self.cable[rail] = False
            connection = survivor.connections.get(rail)
            if connection is not None:
                self.later(0.001, 0.02, self.ended, survivor.me, connection, m.Failure.PEER_GONE)

    # ---- what happens

    def fault(self, until: float) -> None:
        rng, when = self.random, self.random.uniform(0, until)
        rail = rng.randrange(self.rails - 1 if self.safe else self.rails)
        kind = rng.random()
        if kind < 0.5:
            self.at(when, self.cut, rail)
        elif kind < 0.65:
            self.at(when, self.set_cable, rail, False)
            self.at(when + rng.uniform(0.1, 1.5), self.set_cable, rail, True)
        elif kind < 0.85:
            me, self.ordered = rng.randrange(2), False
            self.at(when, self.set_mute, rail, me, True)
            self.at(when + rng.uniform(0.1, 3.0), self.set_mute, rail, me, False)
        else:
            self.at(when, self.slow, rng.randrange(2), rail)

    def run(self) -> None:
        rng = self.random
        for rail in range(self.rails):
            self.connect(rail)
        until = rng.choice((0.05, 0.5, 3.0))
        for end in self.ends:
            for op in range(rng.randint(1, 3)):
                for index in range(rng.randint(1, 5)):
                    length = rng.choice(LENGTHS)
                    deadlines = [rng.uniform(0, until + 1) if rng.random() < 0.05 else math.inf for _ in range(2)]
                    submit = m.Submit(op, index, length, rng.random() < 0.85, deadlines[0])
                    self.at(rng.uniform(0, until), self.submit, end.me, submit)
                    self.at(rng.uniform(0, until), self.post, 1 - end.me, m.Post(op, index, length, deadlines[1]))
        for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
            self.fault(until)
        if rng.random() < 0.1:
            self.at(rng.uniform(0, until), self.forget, rng.randrange(2), 0)
        if rng.random() < 0.2:
            seconds = rng.choice((0.3, 1.0, 4.0))  # a living peer is not lost for being a second late
            self.excused |= seconds > 1.0
            self.at(rng.uniform(0, until), self.stop, rng.randrange(2), seconds)
        killed = None
        if rng.random() < 0.05:
            killed, self.excused = rng.randrange(2), True
            self.at(rng.uniform(0, until), self.kill, killed)
        while self.queue and self.queue[0][0] < END_S:
            self.now, _, what, args = heapq.heappop(self.queue)
            what(*args)
            if self.now > 2 * until + 1 and self.done():
                break
        self.judge(killed)

    def submit(self, me: int, event: m.Submit) -> None:
        if self.stopped(me, self.submit, me, event):
            return
        end = self.ends[me]
        if event.op not in end.forgotten and not end.ended:
            end.submitted[event.op, event.index] = event
            end.tell(event)

    def post(self, me: int, event: m.Post) -> None:
        if self.stopped(me, self.post, me, event):
            return
        end = self.ends[me]
        if event.op not in end.forgotten and not end.ended:
            end.lent[event.op, event.index] = "nothing"
            end.tell(event)

    def forget(self, me: int, op: int) -> None:
        if self.stopped(me, self.forget, me, op):
            return
        end = self.ends[me]
        end.forgotten.add(op)
        for name in [name for name in end.lent if name[0] == op]:
            del end.lent[name]
        end.tell(m.Forget(op))

    # ---- judgement

    def done(self) -> bool:
        return all(end.dead or end.ended or not self.open_ends(end) for end in self.ends)

    def open_ends(self, end: End) -> list[str]:
        """What `end` still waits for."""
        peer = self.ends[1 - end.me]
        over = end.forgotten | peer.forgotten
        waits = []
        for name in end.submitted:
            given_up = name[0] in over or (name, True) in end.failed or (name, False) in peer.failed
            if name not in end.sent and not given_up:
                waits.append(f"{end.me} has not Sent {name}")
        for name in end.lent:
            if name[0] not in over and (name, True) not in peer.failed:
                waits.append(f"{end.me} has not Received {name}")
        if any(rail.send is not SendState.DEFAULT or rail.receive is not ReceiveState.DEFAULT for rail in end.link.rails):
            waits.append(f"{end.me}: rails {[(rail.send.value, rail.receive.value) for rail in end.link.rails]} are not back")
        if end.link._outbox.flights:
            waits.append(f"{end.me}: {len(end.link._outbox.flights)} frames are not acknowledged")
        return waits

    def judge(self, killed: int | None) -> None:
        for end in self.ends:
            if end.dead:
                continue
            if end.ended is None:
                check(killed is None, f"{end.me} did not notice that its peer died")
                if not self.ends[1 - end.me].ended:
                    check(not self.open_ends(end), "; ".join(self.open_ends(end)))
            else:
                check(self.excused, f"{end.me} says {end.ended} while a rail was sound")
                check(isinstance(end.ended, m.Lost) and end.ended.failure is not m.Failure.PROGRAM, f"{end.ended}")


def run(seeds: range) -> None:
    for seed in seeds:
        try:
            World(seed).run()
        except Exception as error:
            raise AssertionError(f"replay: World({seed}, log=True).run()  # {type(error).__name__}: {error}") from error


def test_every_message_arrives_once_whatever_rails_do() -> None:
    run(range(500))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_every_message_arrives_once_in_twenty_thousand_worlds(part: int) -> None:
    run(range(1000 + 2000 * part, 3000 + 2000 * part))


# ---------------------------------------------------------------- rules broken on purpose

Patch = pytest.MonkeyPatch


def no_ledger(patch: Patch) -> None:
    """The receiver takes whatever comes, however often."""
    patch.setattr(Ledger, "__contains__", lambda self, sequence: False)


def counted_before_it_is_whole(patch: Patch) -> None:
    """A message enters the ledger with its header."""
    announce = Inbox.announce

    def early(self: Inbox, rail: Rail, frame: frames.Frame, current: bool, out: list[m.Action]) -> None:
        announce(self, rail, frame, current, out)
        if current:
            self.ledger.take(frame.sequence)

    patch.setattr(Inbox, "announce", early)


def older_copies_keep_writing(patch: Patch) -> None:
    """Nobody tells the rail whose copy was superseded, or whose operation was forgotten, to let go of the memory."""
    patch.setattr(Inbox, "_let_go", lambda self, rail, out: None)


def sent_without_credit(patch: Patch) -> None:
    """Long messages do not wait for their receiver."""
    submit = Outbox.submit

    def eager(self: Outbox, event: m.Submit, out: list[m.Action]) -> None:
        self.credits.setdefault((event.op, event.index), event.length)
        submit(self, event, out)

    patch.setattr(Outbox, "submit", eager)


def eager_memory_without_end(patch: Patch) -> None:
    """The sender does not count what waits at the receiver."""
    patch.setattr(link_send, "eager_charge", lambda length: 0)


def failed_rails_are_not_resent(patch: Patch) -> None:
    """What was on a failed rail is given up."""
    resolve = Outbox.resolve

    def forgetful(self: Outbox, rail: Rail, why: Any, out: list[m.Action]) -> None:
        resolve(self, rail, why, out)
        self.again.clear()

    patch.setattr(Outbox, "resolve", forgetful)


def what_must_not_be_repeated_is(patch: Patch) -> None:
    """Everything is resent."""
    resolve = Outbox.resolve

    def careless(self: Outbox, rail: Rail, why: Any, out: list[m.Action]) -> None:
        for flight in rail.flights.values():
            if flight.message is not None:
                flight.message.repeatable = True
        resolve(self, rail, why, out)

    patch.setattr(Outbox, "resolve", careless)


def handshakes_are_asked_once(patch: Patch) -> None:
    """A RESUME that was lost with the rail it was on is not repeated."""
    handshake = Failover._handshake

    def once(self: Failover, rail: Rail, now: float, out: list[m.Action]) -> None:
        if rail.via[0] < 0:
            handshake(self, rail, now, out)

    patch.setattr(Failover, "_handshake", once)


def probes_wait_for_ever(patch: Patch) -> None:
    """A probe or a switch that is not answered in time does not fail its rail."""
    leave = Failover.leave

    def patient(self: Failover, rail: Rail, reason: str, now: float, out: list[m.Action]) -> None:
        if reason.startswith("no answer"):
            rail.wake_s = float("inf")
        else:
            leave(self, rail, reason, now, out)

    patch.setattr(Failover, "leave", patient)


def acknowledged_with_its_header(patch: Patch) -> None:
    """The receiver acknowledges a message whose header it has seen."""
    counters = Wire.counters

    def hasty(self: Wire) -> bytes:
        floor = self.inbox.ledger.floor
        arriving = [rail.arrival.frame.sequence for rail in self.rails if rail.arrival is not None and rail.arrival.counts]
        if floor + 1 in arriving:
            return frames.counters_body(frames.Counters(floor + 1, self.inbox.consumed))
        return counters(self)

    patch.setattr(Wire, "counters", hasty)


def no_gaps_in_acknowledgements(patch: Patch) -> None:
    """The newest number received counts as if all before it had come."""
    take = Ledger.take

    def leap(self: Ledger, sequence: int) -> bool:
        new = take(self, sequence)
        self.floor = max(self.floor, sequence)
        self.above = {number for number in self.above if number > self.floor}
        return new

    patch.setattr(Ledger, "take", leap)


BROKEN = [
    no_ledger,
    counted_before_it_is_whole,
    older_copies_keep_writing,
    sent_without_credit,
    eager_memory_without_end,
    failed_rails_are_not_resent,
    what_must_not_be_repeated_is,
    handshakes_are_asked_once,
    probes_wait_for_ever,
    acknowledged_with_its_header,
    no_gaps_in_acknowledgements,
]


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Callable[[Patch], None], monkeypatch: Patch) -> None:
    rule(monkeypatch)
    with pytest.raises(AssertionError, match="replay: World"):
        run(range(3000))  # most are noticed among the first fifty
