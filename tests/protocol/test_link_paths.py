"""Links whose rails are paths, in a network of shared paths of different rates, simulated: who goes where, and how fast."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from helixrt.errors import Cause, ConfigError
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Reason, Unloaded
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import HEADER_BYTES, Frame, Kind
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions

FAST, SLOW = 25e6, 2.5e6  # bytes per second
CHUNK = 1 << 20
WAY_S = 1e-4
QUANTUM = 16 << 10
HOPPING = HoppingOptions(unloaded=Unloaded(FAST))


class End:
    """One end of a sender's link to its receiver: end 0 sends, end 1 receives."""

    def __init__(self, net: Net, pair: int, me: int, link: Link) -> None:
        self.net, self.pair, self.me, self.link = net, pair, me, link
        self.log: list[m.Action] = []
        self.frames: list[list[Frame]] = [[] for _ in net.rates]  # what it sent on each path
        self.arriving: dict[int, Frame] = {}
        self.woken_s = float("inf")

    def tell(self, event: m.Event) -> None:
        for action in self.link.on(event, self.net.now):
            self.log.append(action)
            match action:
                case m.SendFrame(rail, frame) | m.SendData(rail, frame):
                    self.frames[rail].append(frame)
                    self.net.send(self, rail, frame)
                case m.Failed() | m.Lost():
                    raise AssertionError(action)
        due = self.link.deadline
        if due < self.woken_s:
            self.woken_s = due
            self.net.at(due, self.wake)

    def wake(self) -> None:
        self.woken_s = float("inf")
        self.tell(m.Tick())

    def took(self, kind: type) -> list[Any]:
        return [action for action in self.log if isinstance(action, kind)]

    def bytes_on(self, path: int) -> int:
        return sum(frame.length for frame in self.frames[path] if frame.kind is Kind.DATA)


class Net:
    """Paths that all senders share; each gives its senders turns. What goes back to a sender meets no queue."""

    def __init__(self, rates: Sequence[float], pairs: int = 1, seed: int = 1, options: LinkOptions | None = None) -> None:
        self.now = 0.0
        self.rates = list(rates)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._queues: list[dict[End, deque[list[Any]]]] = [{} for _ in rates]
        self._busy = [False] * len(rates)
        self.cut: set[tuple[int, int]] = set()  # (pair, path)
        options = options or LinkOptions(hopping=HOPPING)
        self.ends = [
            [End(self, pair, me, Link(1, 1 - me, len(rates), options, random.Random(f"{seed} {pair} {me}"))) for me in range(2)]
            for pair in range(pairs)
        ]
        for one, other in self.ends:
            for path in range(len(rates)):
                one.tell(m.RailUp(path, 1))
                other.tell(m.RailUp(path, 1))

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._count), what))

    def run(self, until: Callable[[], bool], limit_s: float = 1000.0) -> None:
        limit_s += self.now
        while not until():
            assert self._heap and self.now < limit_s, "nothing happens any more"
            self.now, _, what = heapq.heappop(self._heap)
            what()

    def send(self, end: End, path: int, frame: Frame) -> None:
        if end.me == 1:
            self.at(self.now + WAY_S, lambda: self._arrive(end, path, frame))
            return
        self._queues[path].setdefault(end, deque()).append([frame, HEADER_BYTES + frame.length])
        if not self._busy[path]:
            self._serve(path)

    def _serve(self, path: int) -> None:
        """The next sender's turn: they come round in order."""
        queues = self._queues[path]
        self._busy[path] = bool(queues)
        if not queues:
            return
        end = next(iter(queues))
        queue = queues.pop(end)
        share = min(QUANTUM, queue[0][1])
        queue[0][1] -= share

        def served() -> None:
            frame, left = queue[0]
            if not left:
                queue.popleft()
                self.at(self.now + WAY_S, lambda: self._arrive(end, path, frame))
            if queue:
                waiting = queues.setdefault(end, deque())
                waiting.extendleft(reversed(queue))
            self._serve(path)

        self.at(self.now + share / self.rates[path], served)

    def _arrive(self, sender: End, path: int, frame: Frame) -> None:
        if (sender.pair, path) in self.cut:
            return
        end = self.ends[sender.pair][1 - sender.me]
        end.tell(m.FrameArrived(path, frame))
        if frame.kind is Kind.DATA:
            end.tell(m.PayloadArrived(path, frame.sequence))

    # ---- flows

    def flows(self, op: int, chunks: Sequence[int], size: int = CHUNK) -> list[float]:
        """Every pair's sender sends so many chunks at once; how long each flow took."""
        begun = self.now
        took: list[float] = [0.0] * len(chunks)
        for (sender, receiver), count in zip(self.ends, chunks, strict=True):
            for index in range(count):
                receiver.tell(m.Post(op, index, size))
                sender.tell(m.Submit(op, index, size))

        def done() -> bool:
            for pair, (sender, receiver) in enumerate(self.ends):
                if not took[pair] and m.Sent(op, chunks[pair] - 1) in sender.log[-3 * chunks[pair] - 50 :]:
                    names = [(a.op, a.index) for a in receiver.took(m.Received) if a.op == op]
                    if len(names) == chunks[pair] == sum(a.op == op for a in sender.took(m.Sent)):
                        assert len(set(names)) == len(names)
                        took[pair] = self.now - begun
            return all(took)

        self.run(done)
        return took


def start_on(net: Net, path: int, pair: int = 0) -> None:
    """As if the policy had drawn it."""
    paths = net.ends[pair][0].link._paths
    assert paths is not None
    paths.policy.path = path


BLIND = LinkOptions(hopping=HoppingOptions(unloaded=Unloaded(FAST), look_first=False))


def test_a_flow_that_begins_on_a_slow_path_leaves_it_after_what_it_gave_it() -> None:
    net = Net([FAST, SLOW], options=BLIND)
    start_on(net, 1)
    (took,) = net.flows(1, [40])
    sender = net.ends[0][0]
    (hop,) = sender.took(m.Hopped)
    assert (hop.old, hop.path, hop.reason) == (1, 0, Reason.CONGESTED) and hop.rtt_s < 0.8 * 7 * CHUNK / FAST
    assert sender.bytes_on(1) == CHUNK, "the one it was given before anything was known of it"
    assert took < 2.1, "39 chunks on the fast path, none of which waited for that one"


def test_ecmp_stays_there() -> None:
    options = LinkOptions(hopping=HoppingOptions(unloaded=Unloaded(FAST), policy=PolicyName.ECMP))
    net = Net([FAST, SLOW], options=options)
    start_on(net, 1)
    (took,) = net.flows(1, [10])
    assert took > 10 * CHUNK / SLOW and net.ends[0][0].bytes_on(0) == 0


def test_whoever_looks_first_does_not_begin_on_a_slow_path() -> None:
    for seed in range(20):
        net = Net([FAST, SLOW, SLOW], seed=seed)
        (took,) = net.flows(1, [3])
        sender = net.ends[0][0]
        assert sender.bytes_on(0) == 3 * CHUNK and took < 3 * CHUNK / FAST + 0.04
        assert {probed.path for probed in sender.took(m.PathProbed)} <= {0, 1, 2}


def test_an_unloaded_path_is_kept_and_probed_by_nobody() -> None:
    net = Net([FAST] * 4)
    net.flows(1, [50])
    sender = net.ends[0][0]
    probes = [frame for path in sender.frames for frame in path if frame.kind is Kind.PROBE]
    assert len({frame.op for frame in probes}) == 3 and not sender.took(m.Hopped), "only those before the first message"
    assert sum(frame.length for frame in probes) == 3 * HOPPING.probe_bytes


def test_a_link_gets_no_more_than_the_depth_of_a_path() -> None:
    net = Net([FAST, FAST], options=BLIND)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, *(rail.bytes for rail in net.ends[0][0].link.rails))
        net.at(net.now + 0.005, look)

    look()
    net.flows(1, [20])
    assert most == HOPPING.depth_bytes


def test_a_message_longer_than_the_depth_goes_alone() -> None:
    net = Net([FAST, SLOW], options=BLIND)
    net.flows(1, [3], size=5 << 20)
    assert sum(net.ends[0][0].bytes_on(path) for path in range(2)) == 15 << 20


def test_short_messages_wait_for_no_path() -> None:
    net = Net([FAST, SLOW], options=BLIND)
    start_on(net, 1)
    sender, receiver = net.ends[0]
    for index in range(2):
        receiver.tell(m.Post(1, index, CHUNK))
        sender.tell(m.Submit(1, index, CHUNK))
    net.run(lambda: bool(sender.bytes_on(1)))
    receiver.tell(m.Post(2, 0, 100))
    sender.tell(m.Submit(2, 0, 100))
    net.run(lambda: m.Received(2, 0) in receiver.log)
    assert net.now < 0.01, "nobody's chunk is through, but it is, over the other path"


def test_both_directions_at_once_do_not_slow_each_others_rtts() -> None:
    net = Net([FAST] * 3)
    one, other = net.ends[0]
    for index in range(20):
        for a, b in ((one, other), (other, one)):
            b.tell(m.Post(1, index, CHUNK))
            a.tell(m.Submit(1, index, CHUNK))
    net.run(lambda: all(len(end.took(m.Received)) == 20 for end in (one, other)))
    acknowledged = [sum(frame.kind is Kind.ACK for frame in one.frames[path]) for path in range(3)]
    busy = max(range(3), key=one.bytes_on)
    assert not one.took(m.Hopped) and acknowledged[busy] < sum(acknowledged) / 2, "they go where the own data does not"


def test_a_path_that_fails_is_left_at_once_and_its_messages_go_elsewhere() -> None:
    net = Net([FAST] * 3)
    sender, receiver = net.ends[0]
    for index in range(20):
        receiver.tell(m.Post(1, index, CHUNK))
        sender.tell(m.Submit(1, index, CHUNK))
    net.run(lambda: len(sender.took(m.Sent)) > 5)
    paths = sender.link._paths
    assert paths is not None
    lost = paths.policy.path
    net.cut.add((0, lost))
    for end in (sender, receiver):
        end.tell(m.RailDown(lost, m.Failure.PATH, "cut"))
    net.run(lambda: len(sender.took(m.Sent)) == 20)
    assert sender.took(m.Hopped)[-1].reason is Reason.LOST and 1 <= sender.link.resent <= 2
    assert len(receiver.took(m.Received)) == 20


def test_a_probe_of_an_earlier_connection_counts_for_nothing() -> None:
    net = Net([FAST, FAST, FAST], options=LinkOptions(hopping=replace(HOPPING, look_within=0.0)))
    sender, receiver = net.ends[0]
    net.cut = {(0, path) for path in range(3)}
    receiver.tell(m.Post(1, 0, CHUNK))
    sender.tell(m.FrameArrived(0, next(f for path in receiver.frames for f in path if f.kind is Kind.CREDIT)))
    sender.tell(m.Submit(1, 0, CHUNK))
    paths = sender.link._paths
    assert paths is not None and paths.policy.looking
    numbers = {rail: -frames[-1].op for rail, frames in enumerate(sender.frames) if frames[-1].kind is Kind.PROBE}
    assert sorted(numbers) == [0, 1, 2]
    for end in (sender, receiver):
        end.tell(m.RailUp(0, 2))
    sender.tell(m.FrameArrived(1, Frame(Kind.PROBED, 1, op=-numbers[0])))
    assert not sender.took(m.PathProbed) and paths.policy.looking


def test_a_delayed_switch_withholds_what_is_new() -> None:
    delayed = LinkOptions(hopping=HoppingOptions(unloaded=Unloaded(FAST), look_first=False, delayed=True, alpha=1.0))
    net = Net([FAST, SLOW], options=delayed)
    start_on(net, 1)
    sender, receiver = net.ends[0]
    for index in range(8):
        receiver.tell(m.Post(1, index, CHUNK))
        sender.tell(m.Submit(1, index, CHUNK))
    net.run(lambda: bool(sender.took(m.Hopped)))
    (hop,), begun, given = sender.took(m.Hopped), net.now, len(sender.took(m.SendData))
    net.run(lambda: len(sender.took(m.SendData)) > given)
    assert net.now - begun == pytest.approx(hop.old_rtt_s - hop.rtt_s)
    net.run(lambda: len(receiver.took(m.Received)) == 8)


def test_paths_that_are_yet_to_connect_are_not_lost() -> None:
    drawn = set()
    for seed in range(40):
        link = Link(1, 1, 4, LinkOptions(hopping=HOPPING), random.Random(seed))
        paths = link._paths
        assert paths is not None
        first = paths.policy.path
        for rail in range(3):
            link.on(m.RailUp(rail, 1), 0.0)
            link.on(m.Post(1, rail, CHUNK), 0.0)
        assert paths.policy.path == first
        link.on(m.RailDown(3, m.Failure.PATH, "it did not connect"), 0.0)
        link.on(m.Post(1, 3, CHUNK), 0.0)
        assert paths.policy.path == first != 3 or (first == 3 and paths.policy.path != 3)
        drawn.add(paths.policy.path)
    assert drawn == {0, 1, 2}


def test_a_link_that_hops_is_striped_and_fault_tolerant() -> None:
    for wrong in ({"striped": False}, {"fault_tolerance": False}):
        with pytest.raises(ConfigError, match="^hopping=hopper: needs"):
            LinkOptions(hopping=HOPPING, **wrong)


def test_an_abort_is_heard_whatever_waits() -> None:
    net = Net([FAST, SLOW])
    sender, receiver = net.ends[0]
    receiver.tell(m.Post(1, 0, CHUNK))
    sender.tell(m.Submit(1, 0, CHUNK))
    sender.tell(m.Abort(Cause("enough")))
    net.run(lambda: bool(receiver.took(m.PeerAborted)))
    assert sender.link.deadline == float("inf")


# ---------------------------------------------------------------- the paper's testbed, in small


def slow_downs(policy: PolicyName, seed: int, rounds: int = 8) -> tuple[list[float], float]:
    """Of each flow; and the share of bytes on slow paths. Four senders, four fast paths and two slow ones; new links, so
    new draws, for every round."""
    rng, found, slow, total = random.Random(seed), [], 0, 0
    options = LinkOptions(hopping=HoppingOptions(unloaded=Unloaded(FAST), policy=policy))
    for number in range(rounds):
        chunks = [rng.choice((4, 4, 16))] * 4
        net = Net([FAST] * 4 + [SLOW] * 2, pairs=4, seed=seed * 1000 + number, options=options)
        found += [took * FAST / (count * CHUNK) for took, count in zip(net.flows(1, chunks), chunks, strict=True)]
        on = [sum(pair[0].bytes_on(path) for pair in net.ends) for path in range(6)]
        slow, total = slow + on[4] + on[5], total + sum(on)
    return found, slow / total


def test_on_unequal_shared_paths_it_beats_blind_hops_and_those_beat_staying() -> None:
    hopper, flowbender, ecmp = (slow_downs(policy, 1) for policy in PolicyName)
    mean = [statistics.mean(found) for found, _ in (hopper, flowbender, ecmp)]
    assert mean[0] < 0.8 * mean[1] and mean[1] < mean[2]
    assert max(hopper[0]) < max(flowbender[0]) <= max(ecmp[0])
    assert hopper[1] < 0.02 and hopper[1] < flowbender[1] / 5
