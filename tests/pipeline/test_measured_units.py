"""What a run measures at its start leads to the best of the neighbouring cuts, or it says why it takes estimates.

There is no clock in these tests: a table says how long each operator takes.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from helixrt.bench._live_storage import LiveStorage
from helixrt.bench.balance import makespan, neighbours, stage_times_of
from helixrt.passes.capture import capture
from helixrt.passes.chunk_times import ChunkTimes
from helixrt.passes.measure import Stopwatch
from helixrt.passes.parts import Part
from helixrt.passes.unit_costs import balanced, unit_costs
from helixrt.passes.units import units
from helixrt.pipeline import measured_units
from helixrt.pipeline.chunk_timer import ChunkTimer
from helixrt.pipeline.measured_units import (
    APART,
    BUDGET_S,
    LEAST_STEP_S,
    PLANS,
    WARM_UP,
    Expected,
    Found,
    disagreement,
    expected,
    measure_units,
    needed_bytes,
    planned,
)
from helixrt.pipeline.unit_times import single_units
from helixrt.schedule.generators.classic import build

WORDS, WIDTH, ROWS, LAYERS, STAGES, MICROBATCHES = 220, 8, 6, 9, 4, 8
Table = Callable[[str, int], float]  # microseconds, by the operator's name and the numbers that it moves


class Words(nn.Module):
    """An embedding that is also the head, and layers alike."""

    def __init__(self, dropout: float = 0.0, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(3 * width, width))
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) @ self.words.weight.t()


def joint_of(model: nn.Module) -> Part:
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    return capture(model, (tokens,), loss=cross_entropy, target=tokens)


@pytest.fixture(scope="module")
def joint() -> Part:
    return joint_of(Words())


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Memory is free when nothing refers to it, not when the garbage collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Counting(TorchDispatchMode):
    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table, self.taken_us = table, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        moved = [value for value in (*args, made) if isinstance(value, torch.Tensor)]
        if not func.is_view:
            self.taken_us += self.table(func._opname, sum(value.numel() for value in moved))
        return made


def table_of(seed: int) -> Table:
    """Each operator costs something of its own for each number that it moves."""
    draws: dict[str, float] = {}

    def taken_us(name: str, moved: int) -> float:
        draws.setdefault(name, random.Random(f"{seed} {name}").uniform(0.2, 5.0))
        return draws[name] * (20 + moved)

    return taken_us


def measure(joint: Part, by_estimates: Expected, cache: Path, clock: Callable[[], float] = lambda: 0.0) -> Found:
    return measure_units(joint, by_estimates, cache=cache, clock=clock)


def timed_by(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(self: Stopwatch, run: Any) -> float:
        with Counting(table) as counting:
            run()
        return counting.taken_us

    monkeypatch.setattr(Stopwatch, "work_us", counted)


def schedule(name: str = "1f1b") -> Any:
    return build(name, STAGES, MICROBATCHES)


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize("name", ["1f1b", "zb"])
@pytest.mark.parametrize("seed", range(4))
def test_by_a_table_of_operators_the_cut_is_the_best_of_its_neighbours(
    joint: Part, name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The makespans are simulated with the times of whole stages, each run by itself."""
    timed_by(table_of(seed), monkeypatch)
    found = measure(joint, expected(joint, schedule(name)), tmp_path)
    starts, count = balanced(joint, schedule(name), measured=found.times).starts, units(joint).count
    cuts = [starts, *neighbours(starts, count)]
    times = stage_times_of(joint, cuts, count, passes=1, rounds=1)
    own, *others = (makespan(each, times, count, (name, MICROBATCHES)) for each in cuts)
    assert own <= 1.02 * min(others), f"seed {seed}: {starts} takes {own}, {cuts[1:]} {others}"


def test_estimates_alone_would_miss_it(joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head that is as slow as all layers together the table, and not the estimates, decides."""
    timed_by(lambda name, moved: 1.0 if moved < WORDS * WIDTH else 500.0, monkeypatch)
    by_estimates = expected(joint, schedule())
    found = measure(joint, by_estimates, tmp_path)
    assert found.times is not None and found.reason == ""
    assert balanced(joint, schedule(), measured=found.times).starts != by_estimates.cut.starts


# ---------------------------------------------------------------- whether, and how often


def test_a_short_step_is_not_worth_measuring(joint: Part) -> None:
    small = expected(joint, schedule())
    assert 0 < small.step_s < LEAST_STEP_S and not small.worthwhile
    assert replace(small, step_s=LEAST_STEP_S).worthwhile
    assert not replace(expected(joint, build("1f1b", 1, 4)), step_s=LEAST_STEP_S).worthwhile  # nothing is cut


@pytest.mark.parametrize("seed", range(20))
def test_as_many_runs_are_made_as_there_is_time_for(seed: int) -> None:
    draw = random.Random(seed)
    round_s, limit_s = draw.uniform(0.01, 10.0), draw.uniform(5.0, 100.0)
    fitting = [plan for plan in PLANS if plan.passes * (WARM_UP + plan.rounds) * round_s <= limit_s]
    assert planned(round_s, limit_s) == (fitting[0] if fitting else None), f"seed {seed}"


def test_what_takes_too_long_by_estimates_is_not_begun(joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkTimer, "run", lambda self, rounds: pytest.fail("was run"))
    long = expected(joint, schedule())
    long = replace(long, times={name: ChunkTimes(9e3, 9e3, 9e3, 18e3) for name in long.times}, step_s=1.0)
    found = measure(joint, long, tmp_path)
    assert found.times is None and "too long for several" in found.reason


class Clock:
    """A run of all units takes `round_s`. `passes` tells of each pass how often a unit was run."""

    def __init__(self, round_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.passes: list[int] = []
        original = measured_units.Turns.run

        def run(turns: measured_units.Turns, rounds: int) -> Any:
            self.passes.append(rounds)
            self.now_s += (WARM_UP + rounds) * round_s
            return original(turns, rounds)

        monkeypatch.setattr(measured_units.Turns, "run", run)

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("round_s", "passes"), [(0.5, [1, 4, 4, 4]), (2.0, [1, 2, 2]), (6.0, [1])])
def test_on_a_slow_machine_fewer_runs_are_made_and_then_none_count(
    joint: Part, round_s: float, passes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_by(table_of(0), monkeypatch)
    clock = Clock(round_s, monkeypatch)
    found = measure(joint, expected(joint, schedule()), tmp_path, clock)
    assert clock.passes == passes and clock.now_s <= BUDGET_S == 20.0
    assert (found.times is None) == (len(passes) == 1) == ("takes 6 s, too long for several in 20 s" in found.reason)


# ---------------------------------------------------------------- noise


def noisy(table: Table, factor: Callable[[int], float], clock: Clock, only: int) -> Table:
    """By a factor for each pass, of operators that move more than `only` numbers."""
    return lambda name, moved: table(name, moved) * (factor(len(clock.passes)) if moved > only else 1.0)


def test_a_machine_that_slows_down_all_alike_is_not_too_busy(
    joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.4, monkeypatch)
    timed_by(noisy(table_of(1), lambda number: 1.0 + number, clock, 0), monkeypatch)
    found = measure(joint, expected(joint, schedule()), tmp_path, clock)
    assert found.times is not None and clock.passes == [1, 4, 4, 4]


def test_a_busy_machine_gives_no_times_and_keeps_none(joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.4, monkeypatch)
    timed_by(noisy(table_of(1), lambda number: 1.0 + number % 2, clock, WORDS * WIDTH // 2), monkeypatch)
    found = measure(joint, expected(joint, schedule()), tmp_path, clock)
    assert found.times is None and "the machine is too busy" in found.reason
    assert clock.now_s <= BUDGET_S and len(clock.passes) > 4  # more were tried
    assert not list(tmp_path.iterdir())


def test_when_the_noise_is_over_the_last_passes_count(joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = table_of(1)
    timed_by(quiet, monkeypatch)
    expected_times = measure(joint, expected(joint, schedule()), tmp_path / "quiet").times
    clock = Clock(0.4, monkeypatch)
    timed_by(noisy(quiet, lambda number: 3.0 if number < 3 else 1.0, clock, WORDS * WIDTH // 2), monkeypatch)
    found = measure(joint, expected(joint, schedule()), tmp_path / "noisy", clock)
    assert found.times == expected_times and len(clock.passes) == 5


def test_graphs_that_take_little_of_a_step_do_not_decide() -> None:
    def taking(ms: float) -> ChunkTimes:
        return ChunkTimes(ms, 0.0, 0.0, 0.0)

    small, large = b"small", b"large"
    passes = [{small: taking(1.0), large: taking(100.0)}, {small: taking(2.0), large: taking(100.0)}]
    assert disagreement(passes, {small: 1, large: 1}) < APART
    assert disagreement(passes, {small: 50, large: 1}) > APART  # there are many of them
    assert disagreement(passes[:1] * 3, {small: 50, large: 1}) == 0.0


# ---------------------------------------------------------------- memory, the disk, what goes wrong


def test_measuring_takes_no_more_memory_than_is_said_and_than_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_collector: None
) -> None:
    large = joint_of(Words(words=3000, width=32))
    by_estimates = expected(large, schedule())
    saved = max(cost.saved_bytes for cost in unit_costs(large, by_estimates.found, measured=by_estimates.times))
    needed = needed_bytes(list(single_units(large).values()), saved)
    timed_by(table_of(0), monkeypatch)
    with LiveStorage([]) as live:
        assert measure(large, by_estimates, tmp_path).times is not None
    assert live.peak_bytes <= 1.5 * needed  # working memory of single operators comes on top
    assert needed <= by_estimates.cut.bytes[by_estimates.stage] == max(by_estimates.cut.bytes)


def test_without_the_memory_nothing_is_run(joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkTimer, "run", lambda self, rounds: pytest.fail("was run"))
    by_estimates = expected(joint, schedule())
    small = replace(by_estimates, cut=replace(by_estimates.cut, bytes=(1e3,) * STAGES))
    found = measure(joint, small, tmp_path)
    assert found.times is None and "more than the 0 MB of stage 0" in found.reason


def test_a_model_that_is_known_is_not_measured_again(joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(table_of(2), monkeypatch)
    first = measure(joint, expected(joint, schedule()), tmp_path)
    timed_by(table_of(3), monkeypatch)
    again = measure(joint, expected(joint, schedule("zb")), tmp_path)
    assert first.times is not None and again.times is not None
    for name, one in first.times.items():
        assert again.times[name].forward_ms == pytest.approx(one.forward_ms, rel=1e-12)
        assert again.times[name].total_ms == pytest.approx(one.total_ms, rel=1e-12)
    torch.set_num_threads(2)  # another setting
    other = measure(joint, expected(joint, schedule()), tmp_path)
    assert other.times is not None and other.times != again.times


def test_random_numbers_go_on_as_if_nothing_had_been_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(table_of(0), monkeypatch)
    dropping = joint_of(Words(dropout=0.5))
    before = torch.random.get_rng_state()
    assert measure(dropping, expected(dropping, schedule()), tmp_path).times is not None
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_layer_that_cannot_be_run_alone_is_told(joint: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ChunkTimer, rounds: int) -> Any:
        raise RuntimeError("index out of range\nmore lines")

    monkeypatch.setattr(ChunkTimer, "run", refuse)
    found = measure(joint, expected(joint, schedule()), tmp_path)
    assert found.times is None
    assert found.reason == "a layer cannot be run alone: RuntimeError: index out of range"


def test_the_shares_of_random_times_are_compared_by_their_extremes() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        names = [bytes([number]) for number in range(4)]
        passes = [{name: ChunkTimes(draw.uniform(1, 2), 0, 0, 0) for name in names} for _ in range(3)]
        counts = {name: draw.randint(1, 9) for name in names}
        most = 0.0
        for one, other in itertools.permutations(passes, 2):
            for name in names:
                wholes = [sum(counts[each] * made[each].forward_ms for each in names) for made in (one, other)]
                most = max(most, one[name].forward_ms / wholes[0] / (other[name].forward_ms / wholes[1]) - 1)
        shares = [counts[n] * p[n].forward_ms / sum(counts[e] * p[e].forward_ms for e in names) for p in passes for n in names]
        if min(shares) >= measured_units.SHARE:
            assert disagreement(passes, counts) == pytest.approx(most), f"seed {seed}"
