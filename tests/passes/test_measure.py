"""Times are a low quantile of runs that agree; a busy machine is noticed, not kept. On machines that the test makes up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from helixrt.passes import estimate, measure, profile_cache
from helixrt.passes.capture import capture
from helixrt.passes.classify import Time, strand
from helixrt.passes.estimate import Rates
from helixrt.passes.fused import Fused
from helixrt.passes.index_ranges import RULES, Range, index_ranges
from helixrt.passes.measure import WINDOWS, Roof, Stopwatch, Together, Window, low_quantile
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.profile import profile
from helixrt.passes.profile_cache import Known, Setting
from helixrt.passes.ranks import Ranks
from helixrt.passes.samples import samples
from helixrt.passes.signatures import signature

BASE_US = 100.0
ATEN = torch.ops.aten


class Machine:
    """Runs take what `slowness(number of the run, draw)` says, times `BASE_US`."""

    def __init__(self, slowness: Callable[[int, random.Random], float], seed: int = 0) -> None:
        self.slowness, self.draw, self.runs, self.pauses = slowness, random.Random(seed), 0, 0

    def work_us(self, watch: Stopwatch, run: Callable[[], Any]) -> float:
        self.runs += 1
        return BASE_US * self.slowness(self.runs, self.draw)

    def sleep(self, seconds: float) -> None:
        self.pauses += 1


def measured(monkeypatch: pytest.MonkeyPatch, machine: Machine, roof: Roof = measure.NO_ROOF, **options: Any) -> Time:
    monkeypatch.setattr(Stopwatch, "work_us", lambda watch, run: machine.work_us(watch, run))
    monkeypatch.setattr(measure.time, "sleep", machine.sleep)
    return Stopwatch(torch.device("cpu"), Ranks(), **options).compute(lambda: None, roof)


def noisy(number: int, draw: random.Random) -> float:
    """Other programs run: anything from 1 to 20 times as long."""
    return draw.uniform(1.0, 20.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_quiet_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    machine = Machine(lambda number, draw: draw.uniform(1.0, 1.1), seed)
    found = measured(monkeypatch, machine, Roof(10.0, 1000.0))
    assert found.steady and found.measured and machine.pauses == 0
    assert BASE_US <= found.time_us <= 1.1 * BASE_US


@pytest.mark.parametrize("seed", range(20))
def test_a_disturbance_that_ends_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    machine = Machine(lambda number, draw: noisy(number, draw) if number < 50 else draw.uniform(1.0, 1.1), seed)
    found = measured(monkeypatch, machine, Roof(10.0, 1000.0))
    assert found.steady and machine.pauses >= 1
    assert BASE_US <= found.time_us <= 1.1 * BASE_US


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_machine_is_said_to_be_busy(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    machine = Machine(noisy, seed)
    found = measured(monkeypatch, machine, Roof(10.0, 1e9))
    assert not found.steady and found.measured and machine.pauses == WINDOWS - 1


def test_a_time_slice_of_others_is_not_the_time_of_an_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 ms in every run of two windows, as was once kept for 65,000 numbers: far beyond the roof, so looked at again."""
    machine = Machine(lambda number, draw: 120.0 if number < 14 else 1.0)
    found = measured(monkeypatch, machine, Roof(1.0, 20 * BASE_US))
    assert found.steady and found.time_us == BASE_US
    without = Machine(lambda number, draw: 120.0 if number < 14 else 1.0)
    assert measured(monkeypatch, without).time_us == 120 * BASE_US, "nothing else gives it away"


def test_an_operator_that_is_slow_in_every_window_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort takes a hundred times what its bytes do, and always the same."""
    machine = Machine(lambda number, draw: 100.0)
    found = measured(monkeypatch, machine, Roof(1.0, 20 * BASE_US))
    assert found.steady and found.time_us == 100 * BASE_US and machine.pauses == WINDOWS - 1
    one_better = Machine(lambda number, draw: 100.0 if number < 30 else 50.0)
    assert not measured(monkeypatch, one_better, Roof(1.0, 20 * BASE_US)).steady, "windows that differ are no proof"


def test_what_no_device_can_do_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, Machine(lambda number, draw: 1.0), Roof(5 * BASE_US, 50 * BASE_US))
    assert not found.steady and found.time_us == 5 * BASE_US
    found = measured(monkeypatch, Machine(lambda number, draw: draw.uniform(200.0, 4000.0)), Roof(1.0, 50 * BASE_US))
    assert not found.steady and found.time_us == 50 * BASE_US


def test_interrupted_runs_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Window.of([1.0, 9.0, 1.0, 9.0, 1.0], [False, True, False, True, False]) == Window(1.0, 0.0)
    assert Window.of([9.0, 9.0, 9.0, 1.0], [True, True, True, False]).interrupted
    assert Window.of([9.0] * 4, [True] * 4) == Window(9.0, 0.0, interrupted=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    counts = iter(range(100_000))
    monkeypatch.setattr(measure, "interruptions", lambda: next(counts))
    machine = Machine(lambda number, draw: 120.0)
    assert not measured(monkeypatch, machine).steady, "runs that agree, each of which lost its processor"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert measured(monkeypatch, Machine(lambda number, draw: 1.0)).steady, "one thread's own time leaves others' out"


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(noisy)
    assert not measured(monkeypatch, machine, patience_s=0.0).steady and machine.pauses == 0


def test_a_fifth_of_the_runs_is_faster() -> None:
    assert low_quantile([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == 2.0
    assert low_quantile([7.0]) == 7.0


@pytest.mark.parametrize(("spans", "expected"), [((10.0, 10.0), True), ((10.0, 90.0), False)])
def test_a_collective_that_varies_is_not_steady_on_any_rank(
    run_stages: Any, monkeypatch: pytest.MonkeyPatch, spans: tuple[float, float], expected: bool
) -> None:
    """One rank is disturbed; both say so, after equally many runs."""

    def work(rank: int, group: Any) -> tuple[Time, int]:
        watch, runs = Stopwatch(torch.device("cpu"), Ranks(group)), [0]

        def once(operation: Any) -> tuple[float, float]:
            runs[0] += 1
            return (spans[runs[0] % 2] if rank else spans[0]), 1.0

        watch._collective = once  # type: ignore[method-assign]
        return watch.collective(lambda: None), runs[0]

    (one, ran), (other, also) = run_stages(2, work)
    assert one == other and one.steady is expected and ran == also


# ------------------------------------------------------------------------------------------------ what is kept


def marked(name: str, whole: Any) -> Callable[..., Time]:
    """As `Stopwatch.compute`, all steady but the operators of that name."""

    def compute(watch: Stopwatch, operation: Any, roof: Roof = measure.NO_ROOF) -> Time:
        return replace(whole(watch, operation, roof), steady=name not in str(getattr(operation, "target", "")))

    return compute


def test_what_is_not_steady_is_used_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = capture(nn.Sequential(nn.Linear(4, 4), nn.GELU()), (torch.randn(2, 4),))
    whole = Stopwatch.compute
    monkeypatch.setattr(Stopwatch, "compute", marked("gelu", whole))
    first = profile(part, cache=tmp_path)
    assert first.unsteady and all("gelu" in name for name in first.unsteady)
    assert all(first.times[name].measured and first.times[name].time_us > 0 for name in first.unsteady)
    kept = profile_cache.load(Setting.here(torch.device("cpu"), 1), tmp_path)
    assert kept.times.keys() == first.times.keys() - set(first.unsteady)
    monkeypatch.setattr(Stopwatch, "compute", marked("nothing", whole))
    second = profile(part, cache=tmp_path)
    assert not second.unsteady and second.cached == len(first.times) - len(first.unsteady)
    assert second.measured == len(first.unsteady)
    monkeypatch.setattr(Stopwatch, "compute", marked("", whole))
    assert not profile(part, cache=tmp_path).unsteady, "all is known now"


def test_only_what_is_steady_goes_to_the_disk(tmp_path: Path) -> None:
    setting = Setting("chip", "2.13", 1, 2, 2)
    good = Known({"mm": Time(1.0)}, {("mm", "sum"): Together(1.0, 1.0, 1.0)}, Rates(1.0, 1.0))
    profile_cache.save(setting, tmp_path, good)
    bad = Known(
        {"mm": Time(9.0, steady=False), "add": Time(9.0, steady=False), "estimated": Time(1.0, measured=False)},
        {("mm", "sum"): Together(9.0, 9.0, 9.0, steady=False)},
        Rates(9.0, 9.0, steady=False),
    )
    profile_cache.save(setting, tmp_path, bad)
    assert profile_cache.load(setting, tmp_path) == good


@pytest.mark.system
def test_a_busy_machine_is_told_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from helixrt import cli

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Stopwatch, "compute", marked("gelu", Stopwatch.compute))
    show = ["strands", "show", "gpt-tiny", "--layers", "1", "--seq-len", "16", "--batch", "1", "--tp", "2"]
    assert cli.main(show) == 0
    assert "\n  the machine was too busy: 2 of " in capsys.readouterr().out
    assert cli.main([*show, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["plan"]["unsteady"]) == 2 and all("gelu" in name for name in found["plan"]["unsteady"])
    unsteady = {one["signature"] for listed in found["strands"].values() for one in listed if not one["steady"]}
    assert unsteady == set(found["plan"]["unsteady"])


# ------------------------------------------------------------------------------------------------ keys


def called(target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
    """A node whose tensors are placeholders; its result is what meta tensors give."""
    graph = fx.Graph()
    number = iter(range(100))

    def node(value: Any) -> Any:
        if isinstance(value, list):
            return [node(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        made = graph.placeholder(f"x{next(number)}")
        made.meta["val"] = value
        return made

    found = graph.call_function(target, tuple(map(node, arguments)), {key: node(value) for key, value in keywords.items()})
    found.meta["val"] = torch.empty(1)
    return found


X = torch.empty(4, 6)
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default
Q = torch.empty(1, 2, 8, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (called(ATTENTION, Q, Q, Q, 0.0, False), called(ATTENTION, Q, Q, Q, 0.0, True)),  # causal: half the work
        (called(ATTENTION, Q, Q, Q, 0.0), called(ATTENTION, Q, Q, Q, 0.1)),
        (called(ATEN.sum.dim_IntList, X, [0], True), called(ATEN.sum.dim_IntList, X, [1], True)),
        (called(ATEN.sort.default, X, -1, False), called(ATEN.sort.default, X, -1, True)),
        (called(ATEN.topk.default, X, 2), called(ATEN.topk.default, X, 2, -1, True, False)),
        (called(ATEN.pow.Tensor_Scalar, X, 2), called(ATEN.pow.Tensor_Scalar, X, 2.5)),
        (called(ATEN.gelu.default, X, approximate="none"), called(ATEN.gelu.default, X, approximate="tanh")),
        (called(ATEN.slice.Tensor, X, 0, 0, 2), called(ATEN.slice.Tensor, X, 0, 0, 4, 2)),
        (called(ATEN.index_put.default, X, [X.long()], X, False), called(ATEN.index_put.default, X, [X.long()], X, True)),
        (called(ATEN.index.Tensor, X, [None, X.long()]), called(ATEN.index.Tensor, X, [X.long()])),
        (called(ATEN._to_copy.default, X, dtype=torch.float64), called(ATEN._to_copy.default, X, dtype=torch.int64)),
    ],
)
def test_booleans_numbers_and_texts_are_part_of_the_key(one: fx.Node, other: fx.Node) -> None:
    assert signature(one, {}) != signature(other, {})


def test_settings_that_change_kernels_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    files = {Setting.here(device, 1).file(tmp_path)}
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        files.add(Setting.here(device, 1).file(tmp_path))
    finally:
        torch.set_float32_matmul_precision(before)
    try:
        torch.use_deterministic_algorithms(True)
        files.add(Setting.here(device, 1).file(tmp_path))
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
    files.add(Setting.here(device, 1).file(tmp_path))
    monkeypatch.setattr(torch.__config__, "show", lambda: "another build")
    files.add(Setting.here(device, 1).file(tmp_path))
    assert len(files) == 5


def part_of(*targets: tuple[Any, tuple[Any, ...]]) -> Part:
    graph = fx.Graph()
    x = graph.placeholder("x")
    results = [graph.call_function(target, (x, *rest)) for target, rest in targets]
    graph.output(tuple(results))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(64, 64)
    module = fx.GraphModule(nn.Module(), graph)
    return Part(module, (Port(Role.INPUT, "0"),), tuple(Port(Role.OUTPUT, f"o{n}") for n in range(len(results))))


def test_ranks_with_other_numbers_plan_with_the_same_times(run_stages: Any, tmp_path: Path) -> None:
    """By place: here both operators of the second rank are alike, and those of the first are not."""
    add = ATEN.add.Tensor
    numbers = ((0, 8), (8, 8))
    parts = [part_of(*((add, (number,)) for number in each)) for each in numbers]

    def work(rank: int, backend: Any) -> list[tuple[str, float]]:
        found = profile(parts[rank], backend, cache=tmp_path)
        return [(operator.signature, operator.time_us) for operator in found.operators(parts[rank])]

    first, second = run_stages(2, work)
    assert first == second and len(set(first)) == 2


# ------------------------------------------------------------------------------------------------ indices

ROWS, WIDE = 50_000, 4
TABLE, MANY = torch.empty(ROWS, WIDE, device="meta"), torch.empty(3000, WIDE, dtype=torch.int64, device="meta")
CHOSEN = torch.empty(3000, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("node", "at", "bound"),
    [
        (called(ATEN.gather.default, TABLE, 0, MANY), 2, ROWS),
        (called(ATEN.gather.default, TABLE, -1, MANY), 2, WIDE),
        (called(ATEN.scatter_add.default, TABLE, 0, MANY, MANY.float()), 2, ROWS),
        (called(ATEN.scatter.value, TABLE, 0, MANY, 1.0), 2, ROWS),
        (called(ATEN.index_select.default, TABLE, 0, CHOSEN), 2, ROWS),
        (called(ATEN.index_add.default, TABLE, 0, CHOSEN, MANY.float()), 2, ROWS),
        (called(ATEN.embedding.default, TABLE, CHOSEN), 1, ROWS),
        (called(ATEN.embedding_dense_backward.default, MANY.float(), CHOSEN, ROWS, -1, False), 1, ROWS),
        (called(ATEN.index.Tensor, TABLE, [CHOSEN]), 1, ROWS),
        (called(ATEN.index_put.default, TABLE, [CHOSEN], MANY.float(), True), 1, ROWS),
        (called(ATEN.take.default, TABLE, CHOSEN), 1, ROWS * WIDE),
        (called(ATEN.nll_loss_forward.default, TABLE.t(), CHOSEN[:WIDE], None, 1, -100), 1, ROWS),
    ],
)
def test_indices_are_spread_over_what_there_is(node: fx.Node, at: int, bound: int) -> None:
    graph_node = next(n for n in node.all_input_nodes if not n.meta["val"].dtype.is_floating_point)
    assert index_ranges(node)[graph_node] == Range(bound)
    for each in node.all_input_nodes:
        each.meta["val"] = torch.empty(each.meta["val"].shape, dtype=each.meta["val"].dtype)
    ((arguments, keywords),) = samples(node)
    given = arguments[at][0] if isinstance(arguments[at], list) else arguments[at]
    assert 0 <= int(given.min()) and int(given.max()) < bound
    if given.numel() > 1000:
        assert int(given.max()) >= int(0.9 * (bound - 1)), "the last rows are hit"
        assert len(given.unique()) > 0.5 * min(bound, given.numel()), "and not a few"
    node.target(*arguments, **keywords)


def test_indices_of_several_dimensions_and_masks() -> None:
    cube = torch.empty(5, 600, 7)
    rows, columns = torch.empty(9, dtype=torch.int64), torch.empty(9, dtype=torch.int64)
    node = called(ATEN.index.Tensor, cube, [rows, columns])
    assert [index_ranges(node)[index] for index in node.all_input_nodes[1:]] == [Range(5), Range(600)]
    node = called(ATEN.index.Tensor, cube, [None, columns])
    assert [index_ranges(node)[index] for index in node.all_input_nodes[1:]] == [Range(600)]
    mask = torch.empty(5, 600, dtype=torch.bool)
    node = called(ATEN.index.Tensor, cube, [mask, columns])
    assert index_ranges(node) == {node.all_input_nodes[2]: Range(7)}


def test_offsets_rise() -> None:
    """Of groups of rows, of bags and of sequences behind one another: anything else is refused, or reads outside."""
    ends = torch.empty(4, dtype=torch.int32)
    node = called(ATEN._grouped_mm.default, torch.empty(100, 16), torch.empty(4, 16, 8), ends)
    ((arguments, _),) = samples(node)
    assert arguments[2].tolist() == [25, 50, 75, 100]
    bag = called(ATEN._embedding_bag.default, TABLE[:100].float(), CHOSEN[:20], torch.empty(5, dtype=torch.int64))
    for each in bag.all_input_nodes:
        each.meta["val"] = torch.empty(each.meta["val"].shape, dtype=each.meta["val"].dtype)
    ((arguments, _),) = samples(bag)
    assert arguments[2].tolist()[0] == 0 and arguments[2].tolist() == sorted(arguments[2].tolist())
    bag.target(*arguments)
    packed = torch.empty(90, 2, 8)
    flash = called(ATEN._flash_attention_forward.default, packed, packed, packed, ends, ends, 30, 30, 0.0, True, False)
    ((arguments, _),) = samples(flash)
    assert arguments[3].tolist() == arguments[4].tolist() == [0, 30, 60, 90]


@pytest.mark.parametrize("fused", [False, True])
def test_states_that_attention_reads_on_the_processor_are_made_there(fused: bool) -> None:
    """Fake tensors say that they are on the GPU, and a GPU's address would end the process. (Meta stands for the GPU.)"""
    heads, state = torch.empty(1, 2, 8, 4), torch.empty((), dtype=torch.int64, device="meta")
    given = (heads, heads, heads, heads, None, heads, torch.empty(1, 2, 8), state, state, 0.1, [True, True, True, False])
    target: Any = ATEN._scaled_dot_product_efficient_attention_backward.default
    if fused:
        graph = fx.Graph()
        inner = [graph.placeholder(f"x{at}") if isinstance(value, torch.Tensor) else value for at, value in enumerate(given)]
        graph.output((graph.call_function(target, tuple(inner)),))
        module = fx.GraphModule(nn.Module(), graph)
        target = Fused(module, "digest", ("attention",), module)
        given = tuple(value for value in given if isinstance(value, torch.Tensor))
    (made, _), *_ = samples(called(target, *given))
    states = [value for value in made if isinstance(value, torch.Tensor) and value.dtype is torch.int64]
    assert [value.device.type for value in states] == ["cpu", "cpu"]


def test_compiled_operators_are_given_indices_in_range() -> None:
    inner = fx.Graph()
    table, index = inner.placeholder("table"), inner.placeholder("index")
    table.meta["val"], index.meta["val"] = torch.empty(ROWS, WIDE), torch.empty(30, 1, dtype=torch.int64)
    wide = inner.call_function(ATEN.expand.default, (index, [30, WIDE]))
    wide.meta["val"] = index.meta["val"].expand(30, WIDE)
    inner.output((inner.call_function(ATEN.gather.default, (table, 0, wide)),))
    module = fx.GraphModule(nn.Module(), inner)
    node = called(Fused(module, "digest", ("gather",), module), table.meta["val"], index.meta["val"])
    assert index_ranges(node) == {node.all_input_nodes[1]: Range(ROWS)}
    ((arguments, _),) = samples(node)
    assert int(arguments[1].max()) > ROWS // 2


def test_every_rule_is_of_an_operator_there_is() -> None:
    assert all(hasattr(ATEN, name) for name in RULES)


def test_the_roof_of_an_operator() -> None:
    part = capture(nn.Linear(8, 4), (torch.randn(2, 8),))
    product = next(node for node in strand(part) if str(node.target).startswith("aten.addmm"))
    roof = estimate.roof(product, Rates(1e9, 0.0, {"float32": 1.0}))
    assert roof == Roof(128.0 / estimate.FASTER, 128.0 * estimate.SLOWER)
    assert not roof.holds(12_000.0) and roof.holds(128.0) and not roof.holds(1.0)
