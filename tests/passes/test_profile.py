"""Profiles: the same on all ranks, kept on disk, doubted when links change, estimated where nothing was measured.

Two ranks are threads over a real Gloo group. Times are never asserted, but what follows from them is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from helixrt import cli
from helixrt.errors import ConfigError
from helixrt.parallel.group import Group as Rank
from helixrt.passes import estimate, factors, measure, profile_cache
from helixrt.passes.capture import capture
from helixrt.passes.classify import Time, strand
from helixrt.passes.errors import DisagreementError
from helixrt.passes.estimate import Limit, Rates, Wire, ring_bytes
from helixrt.passes.group_private import group_named
from helixrt.passes.groups import Group, locate
from helixrt.passes.measure import NO_ROOF, Operation, Roof, Stopwatch, Together
from helixrt.passes.operators import COMMUNICATION, Kind, Operator
from helixrt.passes.overlap_table import _OnStream
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.profile import Profile, device_of, profile
from helixrt.passes.profile_cache import Known, Setting
from helixrt.passes.ranks import Ranks
from helixrt.passes.replay import random_state
from helixrt.passes.samples import samples
from helixrt.passes.split import split, whole_backward
from helixrt.passes.timing import simulate
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import ParallelGroups
from tests.passes.two_ranks import on_two_ranks

SEQ = 8
SMALL = ModelConfig(family="gpt", layers=2, dim=8, heads=2, kv_heads=1, ffn=16, vocab=17)
NAMES = ("profiled-0", "profiled-1")  # threads share one registry of groups, so each rank has its own name


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def captured(rank: int) -> tuple[Part, Part]:
    """Forward and backward of a GPT, as one of two tensor-parallel ranks has it."""
    groups = ParallelGroups(tp=Rank(NAMES[rank], rank, 2))
    module = build_chunk(SMALL, SEQ, 0, 1, groups=groups)
    tokens = torch.arange(2 * SEQ).view(2, SEQ) % 17
    halves = split(capture(module, (tokens,), loss=cross_entropy, target=tokens.flip(1)))
    return halves.forward, whole_backward(halves)


@pytest.fixture(scope="module")
def parts() -> list[tuple[Part, Part]]:
    return [captured(rank) for rank in range(2)]


@pytest.fixture(autouse=True)
def _an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs beside these tests may make times vary; that is `test_measure`'s concern."""
    for name in ("SPREAD", "COLLECTIVE_SPREAD"):
        monkeypatch.setattr(measure, name, math.inf)
    monkeypatch.setattr(Roof, "holds", lambda roof, time_us: True)


def agreed(one: Profile, other: Profile) -> bool:
    return (one.times, one.pairs, one.overlap) == (other.times, other.pairs, other.overlap)


@pytest.mark.system
def test_ranks_end_with_one_profile_and_find_it_again(run_stages: Any, parts: Any, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first = on_two_ranks(run_stages, NAMES, lambda rank: profile(parts[rank], cache=tmp_path))
    assert torch.equal(torch.get_rng_state(), state), "profiling draws no random numbers of the job's"
    assert agreed(*first)
    found = first[0]
    assert found.cached == 0 and found.measured == len(found.times) > 10
    assert all(time.measured and 0 <= time.host_us <= time.time_us > 0 for time in found.times.values())
    communication = [name for name in found.times if " over 2 ranks gloo" in name]
    assert len(communication) == 1, "forward's and backward's all-reduces are alike, and measured once"
    assert {names[1] for names in found.pairs} == set(communication)
    low, high = factors.SPAN
    assert all(low <= value <= high for value in found.overlap.measured.values())
    assert len(found.overlap.measured) == len(found.times) - 1, "every compute operator has a factor beside it"
    for own, part in zip(first, parts, strict=True):
        for operator in (o for graph in part for o in own.operators(graph)):
            timed = operator.kind is Kind.COMPUTE or operator.kind in COMMUNICATION
            assert (operator.time_us > 0) == timed

    again = on_two_ranks(run_stages, NAMES, lambda rank: profile(parts[rank], cache=tmp_path))
    assert agreed(*again)
    assert again[0].cached >= len(found.times) - 1  # the collective may be doubted on a busy machine
    compute = found.times.keys() - set(communication)
    assert {name: again[0].times[name] for name in compute} == {name: found.times[name] for name in compute}


@pytest.mark.system
def test_a_link_that_changed_is_measured_again(run_stages: Any, parts: Any, tmp_path: Path) -> None:
    on_two_ranks(run_stages, NAMES, lambda rank: profile(parts[rank], cache=tmp_path))
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    for name, time in kept["known"]["times"].items():
        if " over " in name:
            time["time_us"] = 1e9
    file.write_text(json.dumps(kept))
    found, _ = on_two_ranks(run_stages, NAMES, lambda rank: profile(parts[rank], cache=tmp_path))
    assert max(time.time_us for time in found.times.values()) < 1e9
    assert found.measured >= 1 and found.cached == len(found.times) - 1


def test_hosts_make_the_kind(run_stages: Any, parts: Any, tmp_path: Path) -> None:
    def located(hosts: str) -> list[dict[str, Group]]:
        return on_two_ranks(run_stages, NAMES, lambda rank: locate(parts[rank], host=hosts[rank]))

    for rank, groups in enumerate(located("aa")):
        assert groups == {NAMES[rank]: Group((2,), "gloo")} and groups[NAMES[rank]].kind is Kind.INTRA
    for rank, groups in enumerate(located("ab")):
        assert groups == {NAMES[rank]: Group((1, 1), "gloo")} and groups[NAMES[rank]].kind is Kind.INTER


def test_estimates_measure_no_operator(run_stages: Any, parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operation, "of", lambda *_: pytest.fail("an operator was run"))
    one, other = on_two_ranks(run_stages, NAMES, lambda rank: profile(parts[rank], mode="estimate", cache=tmp_path))
    assert agreed(one, other)
    assert one.measured == one.cached == 0 and not one.pairs and not list(tmp_path.iterdir())
    assert all(time.time_us > 0 and not time.measured for time in one.times.values())
    assert set(one.overlap.kinds.values()) == {factors.ASSUMED}


def test_an_operator_that_fails_is_estimated(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = capture(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    failing = next(node for node in strand(part) if str(node.target).startswith("aten.addmm"))
    whole = Stopwatch.compute

    def compute(watch: Stopwatch, operation: Operation, roof: Roof = NO_ROOF) -> Time:
        if operation.target is failing.target:
            raise RuntimeError("no kernel")
        return whole(watch, operation, roof)

    monkeypatch.setattr(Stopwatch, "compute", compute)
    found = profile(part, cache=tmp_path)
    assert [name.partition("(")[0] for name, time in found.times.items() if not time.measured] == ["aten.addmm"]
    kept = profile_cache.load(Setting.here(torch.device("cpu"), 1), tmp_path)
    assert kept.times.keys() == {name for name, time in found.times.items() if time.measured}, "estimates are not kept"


def test_ranks_with_other_graphs_are_told(run_stages: Any, parts: Any, tmp_path: Path) -> None:
    with pytest.raises(DisagreementError, match="different numbers of operators"):
        on_two_ranks(run_stages, NAMES, lambda rank: profile(parts[rank][: 2 - rank], cache=tmp_path))


def test_ranks_with_other_shapes_plan_alike(run_stages: Any, tmp_path: Path) -> None:
    """Uneven shards: rank 1's operators go by the names and times that all agreed on."""
    uneven = [capture(torch.nn.Linear(4, 4), (torch.randn(rank + 2, 4),)) for rank in range(2)]

    def work(rank: int) -> tuple[Profile, list[Operator]]:
        found = profile(uneven[rank], group_named(NAMES[rank]), cache=tmp_path)
        return found, found.operators(uneven[rank])

    (one, first), (other, second) = on_two_ranks(run_stages, NAMES, work)
    assert agreed(one, other) and not one.names and other.names
    assert [(o.signature, o.time_us) for o in first if o.time_us] == [(o.signature, o.time_us) for o in second if o.time_us]


def test_a_wrong_mode_is_one_line(parts: Any) -> None:
    with pytest.raises(ConfigError, match="^profile=sometimes: must be one of auto, measure, estimate$"):
        profile(parts[0], mode="sometimes")


def test_samples_are_as_the_graph_says_and_run(parts: Any) -> None:
    for part in parts[0]:
        for node in strand(part):
            if "c10d" in str(node.target) or node.op != "call_function":
                continue
            for arguments, keywords in samples(node, cold_bytes=2048):
                given = [value for value in torch.utils._pytree.tree_leaves(arguments) if isinstance(value, torch.Tensor)]
                for before, value in zip(node.all_input_nodes, given, strict=False):
                    example = before.meta["val"]
                    if isinstance(example, torch.Tensor) and len(node.all_input_nodes) == len(given):
                        assert (value.shape, value.stride(), value.dtype) == (example.shape, example.stride(), example.dtype)
                result = node.target(*arguments, **keywords)
                for value in torch.utils._pytree.tree_leaves(result):
                    assert not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all()), node


# ------------------------------------------------------------------------------------------------ factors

COMPUTE, TALK = "mm", "all_reduce over 2 ranks"
KINDS = {COMPUTE: Kind.COMPUTE, TALK: Kind.INTRA}


@pytest.mark.parametrize("host", [0.0, 30.0])
@pytest.mark.parametrize("lost", [0.0, 5.0, 40.0, 90.0])
@pytest.mark.parametrize("compute", [120.0, 400.0])
def test_the_search_predicts_the_pair_that_was_measured(compute: float, lost: float, host: float) -> None:
    """The timing of a launch, compute that outlasts the collective, and the wait is what both took together."""
    pair = Together(compute, 100.0, compute + host + lost)
    time = Time(100.0, factors.host_us(KINDS, {TALK: Time(100.0, host)}, {(COMPUTE, TALK): pair})[TALK])
    overlap = factors.overlap(KINDS, {COMPUTE: Limit.MEMORY}, {TALK: time}, {(COMPUTE, TALK): pair})
    launch = Operator("launch", Kind.INTRA, time.time_us, signature=TALK, host_us=time.host_us)
    listed = [launch, Operator("mm", Kind.COMPUTE, compute, signature=COMPUTE), Operator("wait", Kind.WAIT, 0.0, (0,))]
    found = simulate([listed], [(0, 0), (0, 1), (0, 2)], overlap).total_us
    assert found == pytest.approx(pair.together_us, rel=1e-6)


def test_what_was_not_paired_is_as_its_like() -> None:
    kinds = {name: Kind.COMPUTE for name in ("mm", "bmm", "add", "mul")} | {TALK: Kind.INTRA, "other over 3": Kind.INTER}
    limits = {name: Limit.ARITHMETIC if "mm" in name else Limit.MEMORY for name in ("mm", "bmm", "add", "mul")}
    times = {name: Time(100.0) for name in kinds}
    pairs = {("mm", TALK): Together(100.0, 100.0, 120.0), ("add", TALK): Together(100.0, 100.0, 150.0)}
    found = factors.overlap(kinds, limits, times, pairs)
    expected = {("mm", TALK): 0.8, ("bmm", TALK): 0.8, ("add", TALK): 0.5, ("mul", TALK): 0.5}
    assert found.measured == pytest.approx(expected)
    assert found.kinds[frozenset({Kind.COMPUTE, Kind.INTRA})] == pytest.approx(0.65)
    assert found.kinds[COMMUNICATION] == found.kinds[frozenset({Kind.COMPUTE, Kind.INTER})] == factors.ASSUMED


def test_other_cores_may_do_the_work_of_communication() -> None:
    alone = {TALK: Time(100.0, 60.0)}
    assert factors.host_us(KINDS, alone, {}) == {TALK: 60.0}
    assert factors.host_us(KINDS, alone, {(COMPUTE, TALK): Together(120.0, 100.0, 121.0)}) == {TALK: 1.0}
    assert factors.host_us(KINDS, alone, {(COMPUTE, TALK): Together(50.0, 100.0, 101.0)}) == {TALK: 60.0}  # says nothing


# ------------------------------------------------------------------------------------------------ estimates, disk


def test_flops_and_bytes_on_the_wire() -> None:
    part = capture(torch.nn.Linear(8, 4), (torch.randn(2, 8),))
    product = next(node for node in strand(part) if str(node.target).startswith("aten.addmm"))
    assert estimate.flops(product) == 2 * 2 * 8 * 4
    fast, slow = (Rates(rate, 0.0, {"float32": 1.0}) for rate in (1e9, 1e-9))
    assert (estimate.limit(product, fast), estimate.limit(product, slow)) == (Limit.ARITHMETIC, Limit.MEMORY)
    assert estimate.compute(product, fast).time_us == 128.0
    sent = {name: ring_bytes(name, 120.0, 4) for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")}
    assert sent == {"all_reduce": 180.0, "all_gather_into_tensor": 360.0, "reduce_scatter_tensor": 90.0}


def test_a_gather_reads_rows_and_what_does_not_fit_into_caches_takes_longer() -> None:
    part = capture(torch.nn.Embedding(1000, 4), (torch.arange(6),))
    gather = next(node for node in strand(part) if str(node.target).startswith("aten.embedding."))
    rates = Rates(1.0, 0.0, {"float32": 1.0})
    rows, indices = 6 * 4 * 4, 6 * 8
    assert estimate.compute(gather, rates).time_us == 2 * rows + indices, "and not the whole table"
    far = dataclasses.replace(rates, cache_bytes=100.0, far_bytes_per_us=0.5)
    assert estimate.compute(gather, far).time_us == 2 * (2 * rows + indices)
    assert (far.moving_us(100.0), far.moving_us(101.0), rates.moving_us(1e9)) == (100.0, 202.0, 1e9)


def test_a_file_keeps_the_newest_operators_and_ranks_get_those_of_their_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new shape brings its own, in runs of months."""
    setting = Setting("A chip (R)", "2.13", 1, 2, 2)
    monkeypatch.setattr(profile_cache, "MOST", 5)
    for number in range(9):
        both = {(f"mm {number}", TALK): Together(6.0, 5.0, 7.0, 2)}
        profile_cache.save(setting, tmp_path, Known({f"mm {number}": Time(3.0), TALK: Time(5.0, 1.0)}, both))
    found = profile_cache.load(setting, tmp_path)
    assert list(found.times) == ["mm 5", "mm 6", "mm 7", "mm 8", TALK]
    assert list(found.pairs) == [(f"mm {number}", TALK) for number in (5, 6, 7, 8)]
    few = found.only({"mm 7", TALK})
    assert set(few.times) == {"mm 7", TALK} and list(few.pairs) == [("mm 7", TALK)]


def test_what_is_known_survives_the_disk(tmp_path: Path) -> None:
    setting = Setting("A chip (R)", "2.13", 1, 2, 2)
    rates = Rates(10.0, 1.0, {"float32": 5.0}, {"2 ranks gloo": Wire(1.0, 2.0, 0.5)})
    known = Known({"mm": Time(3.0), TALK: Time(5.0, 1.0)}, {("mm", TALK): Together(6.0, 5.0, 7.0, 2)}, rates)
    assert profile_cache.load(setting, tmp_path) == Known()
    profile_cache.save(setting, tmp_path, known)
    assert profile_cache.load(setting, tmp_path) == known
    profile_cache.save(setting, tmp_path, Known({"add": Time(1.0)}))
    assert profile_cache.load(setting, tmp_path) == known.joined(Known({"add": Time(1.0)}))
    assert known.without("2 ranks") == Known({"mm": Time(3.0)}, {}, rates)
    other = Setting("A chip (R)", "2.13", 1, 2, 2, link="1gbit")
    assert profile_cache.load(other, tmp_path) == Known(), "another link is another setting"
    for text in ("{", "[]", '{"known": {"times": {"mm": {"hours": 1}}, "pairs": [], "rates": null}}'):
        setting.file(tmp_path).write_text(text)
        assert profile_cache.load(setting, tmp_path) == Known()
    profile_cache.save(setting, tmp_path, known)
    assert profile_cache.load(setting, tmp_path) == known


def test_a_profile_that_cannot_be_kept_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept for the next run"):
        profile_cache.save(Setting("chip", "2.13", 1, 2, 1), tmp_path / "file" / "folder", Known())


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HELIXRT_CACHE", raising=False)
    assert profile_cache.default_folder() == tmp_path / "helixrt" / "profiles"
    monkeypatch.setenv("HELIXRT_CACHE", str(tmp_path / "mine"))
    assert profile_cache.default_folder() == tmp_path / "mine" / "profiles"


def test_a_part_computes_where_its_operators_do_that_are_off_the_processor() -> None:
    """A generator's state lies on the processor, wherever the numbers are drawn. (Meta stands for a GPU.)"""
    graph = fx.Graph()
    x = graph.placeholder("x")
    state, drawn = (
        graph.call_function(random_state, (torch.device("cpu"),)),
        graph.call_function(torch.ops.aten.sin.default, (x,)),
    )
    graph.output((state, drawn))
    state.meta["val"], drawn.meta["val"] = torch.empty(16, dtype=torch.uint8), torch.empty(4, device="meta")
    ports = (Port(Role.INPUT, "0"),), (Port(Role.OUTPUT, "state"), Port(Role.OUTPUT, "drawn"))
    part = Part(fx.GraphModule(nn.Module(), graph), *ports)
    assert device_of([part]) == torch.device("meta")
    drawn.meta["val"] = torch.empty(4)
    assert device_of([part]) == torch.device("cpu") == device_of([])


def test_the_rate_of_memory_is_that_of_vectors_that_are_all_read() -> None:
    class Watch(Stopwatch):
        def compute(self, operation: Any, roof: Roof = NO_ROOF) -> Time:
            ran.append(operation)
            return Time(1.0)

    ran: list[Operation] = []
    rates = estimate.device_rates(Watch(torch.device("cpu"), Ranks()), [])
    (one, other), _ = max((operation.arguments[0] for operation in ran), key=lambda given: given[0][0].numel())
    assert one.data_ptr() != other.data_ptr() and rates.bytes_per_us == 3.0 * one.nbytes


def test_a_gpu_may_be_faster_than_the_rate_of_a_dtype() -> None:
    """Convolutions of float32 use TF32 unless told otherwise. (Meta stands for a GPU.)"""
    rates = Rates(1000.0, 1.0, {"float32": 1000.0})
    for device, least_us in (("cpu", 2 * 64**3 / 1000 / 2), ("meta", 0.0)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        product = graph.call_function(torch.ops.aten.mm.default, (x, x))
        x.meta["val"] = product.meta["val"] = torch.empty(64, 64, device=device)
        assert estimate.roof(product, rates).least_us == pytest.approx(least_us)


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device=tpu: must be cpu or cuda"),
        (["--heads", "3"], "--heads=3: must divide the hidden size, 512"),
        (["--dtype", "int8"], "--dtype=int8: must be one of float32, bfloat16, float16, float64"),
        (["--processes", "1"], "--processes=1: must be a whole number, at least 2 and below 1000000"),
        (["--device", "cuda", "--processes", "0"], "--processes=0: must be a whole number, at least 1 and below 1000000"),
        (["--format", "svg"], "--format=svg: must be one of text, json"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "overlap", *arguments]) == cli.USAGE_ERROR
    assert capsys.readouterr().err == f"helixrt: {message}\n"


@pytest.mark.slow
def test_the_table_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--device", "cpu", "--tokens", "16", "--hidden", "16", "--heads", "2"]
    assert cli.main(["profile", "overlap", *sizes, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in found["operators"]]
    assert names == ["GEMM", "FA", "FA_BWD", "all-gather local", "all-to-all local", "all-reduce local"]
    assert found["ranks_per_host"] == [2] and found["backend"] == "gloo"
    assert [(p["first"], p["second"]) for p in found["pairs"]] == [(a, b) for i, a in enumerate(names) for b in names[i:]]
    for pair in found["pairs"]:
        alone = (pair["first_us"], pair["second_us"])
        assert pair["effectiveness"] == pytest.approx((sum(alone) - pair["together_us"]) / min(alone))


@pytest.mark.gpu
def test_copies_and_backwards_of_attention_run_beside_other_work(capsys: pytest.CaptureFixture[str]) -> None:
    """One process measures without collectives. A matrix product leaves the copy engines to copies."""
    sizes = ["--device", "cuda", "--processes", "1", "--tokens", "4096", "--hidden", "2048", "--heads", "16"]
    assert cli.main(["profile", "overlap", *sizes, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in found["operators"]]
    assert names == ["GEMM", "FA", "FA_BWD", "to host", "from host"] and found["ranks_per_host"] == [1]
    assert all(row["alone_us"] > 0 for row in found["operators"])
    pairs = {(pair["first"], pair["second"]) for pair in found["pairs"]}
    assert {("GEMM", "to host"), ("GEMM", "from host"), ("FA_BWD", "to host")} <= pairs


@pytest.mark.gpu
def test_a_backward_beside_other_work_is_on_the_second_stream() -> None:
    beside, x = _OnStream(torch.device("cuda")), torch.randn(64, 64, device="cuda", requires_grad=True)
    seen: list[torch.cuda.Stream] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(torch.cuda.current_stream())
            return gradient

    def backward() -> Any:
        output = Seen.apply(x)
        return lambda: torch.autograd.grad(output, x, output, retain_graph=True)

    run, start = beside.made(backward)
    start().wait()
    run()
    torch.cuda.synchronize()
    assert seen == [beside.stream, torch.cuda.current_stream()]
