"""The fetch plan under random delays, spoilt pieces, dying and slow donors, with a virtual clock."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from helixrt.protocol.catchup import (
    Action,
    Arrived,
    Ask,
    Begin,
    DonorLost,
    Drop,
    Event,
    Failed,
    Fetch,
    FetchRules,
    Finished,
    Heard,
    Keep,
    Piece,
    Tick,
    cut,
)

RULES = FetchRules()


@dataclass
class DonorModel:
    """`seconds_per_byte`; spoils a piece with probability `spoils`; dies at `dies_at`; never answers if `mute`."""

    seconds_per_byte: float = 1e-8
    jitter: float = 0.0
    spoils: float = 0.0
    dies_at: float = float("inf")
    mute: bool = False
    tells_every_s: float = float("inf")  # that some bytes of a piece have come
    busy_until: float = 0.0


@dataclass
class World:
    """Runs a fetch against donor models; checks what must always hold."""

    total: int
    donors: dict[str, DonorModel]
    rng: random.Random
    rules: FetchRules = RULES
    now: float = 0.0
    kept: list[Piece] = field(default_factory=list)
    outcome: Finished | Failed | None = None
    dropped: list[str] = field(default_factory=list)

    def run(self, limit_s: float = 1000.0) -> Fetch:
        fetch = Fetch(self.total, list(self.donors), self.rules)
        flying: dict[str, set[Piece]] = {name: set() for name in self.donors}
        agenda: list[tuple[float, int, Event]] = [(0.0, 0, Begin())]
        number = 0

        def later(at: float, event: Event) -> None:
            nonlocal number
            number += 1
            heapq.heappush(agenda, (at, number, event))

        for name, model in self.donors.items():
            if model.dies_at < limit_s:
                later(model.dies_at, DonorLost(name, "died"))
        while self.outcome is None:
            if not agenda or agenda[0][0] > self.now + 0.05:
                later(self.now + 0.05, Tick())
            self.now, _, event = heapq.heappop(agenda)
            assert self.now < limit_s, "the fetch does not end"
            if isinstance(event, Arrived):
                if self.now >= self.donors[event.donor].dies_at or event.donor in self.dropped:
                    continue
                flying[event.donor].discard(event.piece)
            for action in fetch.on(event, self.now):
                self._act(action, event, flying, later)
        assert fetch.on(Tick(), self.now) == []
        return fetch

    def _act(self, action: Action, event: Event, flying: dict[str, set[Piece]], later) -> None:  # type: ignore[no-untyped-def]
        match action:
            case Ask(name, piece):
                assert name not in self.dropped and piece not in flying[name]
                flying[name].add(piece)
                assert len(flying[name]) <= self.rules.in_flight
                model = self.donors[name]
                if model.mute:
                    return
                takes = piece.nbytes * model.seconds_per_byte * (1 + model.jitter * self.rng.random())
                begin = max(self.now, model.busy_until)
                model.busy_until = begin + takes + 1e-4
                while (begin := begin + model.tells_every_s) < model.busy_until:
                    later(begin, Heard(name))
                later(model.busy_until, Arrived(name, piece, self.rng.random() >= model.spoils))
            case Keep(name, piece):
                assert isinstance(event, Arrived) and event.intact and (event.donor, event.piece) == (name, piece)
                self.kept.append(piece)
            case Drop(name, _):
                self.dropped.append(name)
            case Finished() | Failed():
                self.outcome = action

    def check_whole(self) -> None:
        """Every byte was kept exactly once."""
        edges = sorted((p.begin, p.end) for p in self.kept)
        assert [begin for begin, _ in edges] == [0, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == self.total


@pytest.mark.parametrize("total", [1, 2, 1000, 5_000, 1 << 20, 123_456_789])
@pytest.mark.parametrize("donors", [1, 2, 3, 7])
def test_pieces_cover_the_state_and_are_equal(total: int, donors: int) -> None:
    pieces = cut(total, donors, RULES)
    assert pieces[0].begin == 0 and pieces[-1].end == total
    assert all(a.end == b.begin for a, b in zip(pieces, pieces[1:], strict=False))
    sizes = {p.nbytes for p in pieces}
    assert max(sizes) - min(sizes) <= 1 and 0 < max(sizes) <= RULES.piece_limit_bytes
    assert cut(0, donors, RULES) == []


def test_nothing_to_fetch_is_finished_at_once() -> None:
    assert Fetch(0, ["a"]).on(Begin(), 0.0) == [Finished()]


@pytest.mark.parametrize("total", [20_000, 4_000_000, 300_000_000])
def test_equal_donors_send_equal_shares(total: int) -> None:
    world = World(total, {name: DonorModel(jitter=0.5) for name in "abc"}, random.Random(1))
    fetch = world.run()
    world.check_whole()
    shares = fetch.per_donor.values()
    assert max(shares) <= 1.2 * min(shares)
    assert not fetch.retried


def test_a_slow_donor_is_relieved() -> None:
    donors = {"slow": DonorModel(1e-6), "a": DonorModel(), "b": DonorModel()}
    world = World(100_000_000, donors, random.Random(2))
    fetch = world.run()
    world.check_whole()
    assert world.now < 10  # alone, its third of the bytes would take it 33 s
    assert 0 < fetch.per_donor["slow"] < fetch.per_donor["a"] / 4


def test_a_spoilt_piece_is_asked_from_another_donor() -> None:
    fetch = Fetch(3, ["a", "b", "c"])
    first = [a for a in fetch.on(Begin(), 0.0) if isinstance(a, Ask) and a.donor == "a"][0]
    again = fetch.on(Arrived("a", first.piece, False), 0.1)
    assert [(type(a), a.donor != "a", a.piece) for a in again if isinstance(a, Ask)] == [(Ask, True, first.piece)]
    assert fetch.retried == {"checksum": 1}


def test_a_donor_that_spoils_everything_is_dropped() -> None:
    world = World(1_000_000, {"bad": DonorModel(spoils=1.0), "good": DonorModel()}, random.Random(3))
    fetch = world.run()
    world.check_whole()
    assert world.dropped == ["bad"] and fetch.per_donor == {"bad": 0, "good": 1_000_000}


def test_a_mute_donor_costs_a_timeout_and_is_dropped_in_the_end() -> None:
    world = World(1_000_000, {"mute": DonorModel(mute=True), "good": DonorModel()}, random.Random(4))
    fetch = world.run()
    world.check_whole()
    assert world.now < 2 * RULES.request_timeout_s and fetch.retried["slow"] == RULES.in_flight
    alone = World(1000, {"mute": DonorModel(mute=True)}, random.Random(4))
    alone.run()
    assert isinstance(alone.outcome, Failed) and "mute" in alone.outcome.reason


@pytest.mark.parametrize("tells", [True, False])
def test_a_donor_is_kept_as_long_as_its_bytes_come(tells: bool) -> None:
    """Each of 16 pieces takes 21 s, four times the timeout of a request."""
    model = DonorModel(2e-5, tells_every_s=1.0 if tells else float("inf"))
    world = World(16 << 20, {"slow": model}, random.Random(6))
    world.run()
    if tells:
        world.check_whole()
        assert world.now > 60 * RULES.request_timeout_s
    else:
        assert isinstance(world.outcome, Failed) and "late" in world.outcome.reason


def test_the_last_pieces_of_a_slow_donor_are_asked_from_another() -> None:
    """It goes on sending, so it is not dropped; the fetch does not wait for it."""
    donors = {"slow": DonorModel(2e-5, tells_every_s=1.0), "good": DonorModel()}
    world = World(16 << 20, donors, random.Random(7))
    fetch = world.run()
    world.check_whole()
    assert world.dropped == [] and world.now < 2 * RULES.request_timeout_s
    assert fetch.retried == {"slow": RULES.in_flight}


def test_a_donor_that_is_silent_at_times_is_kept() -> None:
    """Silences count in a row: in a long fetch there is time for many of them."""
    fetch = Fetch(1 << 20, ["a"])
    now, asked = 0.0, [a.piece for a in fetch.on(Begin(), 0.0) if isinstance(a, Ask)]
    while asked:
        now += 1.2 * RULES.request_timeout_s
        assert not [a for a in fetch.on(Tick(), now) if isinstance(a, Drop)]
        actions = fetch.on(Arrived("a", asked.pop(0), True), now)
        asked += [a.piece for a in actions if isinstance(a, Ask)]
    assert actions[-1] == Finished()


def test_with_no_donor_left_the_fetch_fails() -> None:
    world = World(100_000_000, {name: DonorModel(1e-7, dies_at=0.5) for name in "ab"}, random.Random(5))
    world.run()
    assert isinstance(world.outcome, Failed) and "died" in world.outcome.reason


def test_any_failures_with_one_sound_donor_end_whole(seed: int) -> None:
    for number in range(300):
        rng = random.Random(f"{seed}/{number}")
        donors = {"sound": DonorModel(10 ** rng.uniform(-9, -7), rng.random())}
        for i in range(rng.randrange(4)):
            donors[f"d{i}"] = DonorModel(
                seconds_per_byte=10 ** rng.uniform(-9, -6),
                jitter=3 * rng.random(),
                spoils=rng.choice([0.0, 0.0, 0.1, 0.7]),
                dies_at=rng.choice([float("inf"), rng.expovariate(3)]),
                mute=rng.random() < 0.1,
            )
        names = list(donors)
        rng.shuffle(names)
        rules = FetchRules(in_flight=rng.randint(1, 4))
        world = World(rng.randrange(1, 50_000_000), {n: donors[n] for n in names}, rng, rules)
        fetch = world.run()
        assert isinstance(world.outcome, Finished), (number, world.outcome)
        world.check_whole()
        assert sum(fetch.per_donor.values()) == world.total, number
