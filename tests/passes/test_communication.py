"""Which operators communicate: torch's beyond the functional collectives, described ones, and unknown ones, which are refused.

Graphs are built by hand or traced with make_fx without autograd; the operators run on two threads over real Gloo groups.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group  # noqa: F401  (defines the operators)
from torch.distributed.tensor import DTensor  # noqa: F401  (defines the operators)
from torch.fx.experimental.proxy_tensor import make_fx

from helixrt.compile.fake_world_private import fake_world
from helixrt.errors import ConfigError
from helixrt.parallel import ring_shift_private  # noqa: F401  (defines the operator)
from helixrt.passes import communication, nodes
from helixrt.passes.agree import agree
from helixrt.passes.classify import classify, movable
from helixrt.passes.communication import How, Pattern, group_argument, register
from helixrt.passes.errors import DisagreementError, VerifyError
from helixrt.passes.group_private import group_named
from helixrt.passes.groups import Group, group_name, locate
from helixrt.passes.nodes import Origin
from helixrt.passes.operators import COMMUNICATION, Kind
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.profile import profile
from helixrt.passes.signatures import signature
from helixrt.passes.verify import collective_order, verify
from helixrt.passes.weave import weave
from helixrt.pipeline.strands import planned
from tests.passes.two_ranks import on_two_ranks

C10D, ATEN, DTENSOR = torch.ops._c10d_functional, torch.ops.aten, torch.ops._dtensor
NAMES = ("communicates-0", "communicates-1")  # threads share one registry of groups
CALLS: Counter[tuple[str, str]] = Counter()  # of the test's operators: by name and group
LOCK = threading.Lock()


def called(name: str, group: str) -> None:
    with LOCK:
        CALLS[name, group] += 1


@torch.library.custom_op("helixtest::exchange", mutates_args=())
def exchange(x: torch.Tensor, group_name: str) -> torch.Tensor:
    called("exchange", group_name)
    return C10D.wait_tensor(C10D.all_reduce(x, "sum", group_name))


@exchange.register_fake
def _(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("helixtest::unknown", mutates_args=())
def unknown(x: torch.Tensor, tp_group: str) -> torch.Tensor:
    called("unknown", tp_group)
    return x.clone()


@unknown.register_fake
def _(x: torch.Tensor, tp_group: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("helixtest::norm", mutates_args=())
def norm(x: torch.Tensor, group: int, mode: str) -> torch.Tensor:
    """Takes a number called `group`, as group norm does, and a string that is no group."""
    return x.clone()


@norm.register_fake
def _(x: torch.Tensor, group: int, mode: str) -> torch.Tensor:
    return torch.empty_like(x)


MINE = torch.ops.helixtest


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "REGISTERED", {})
    register("helixtest::exchange", How.BLOCKS, pattern=Pattern.ALL_REDUCE)
    CALLS.clear()


def part_of(module: fx.GraphModule, inputs: int = 1) -> Part:
    """A traced function as a part, each node with an origin as capture gives it."""
    module.graph.eliminate_dead_code()
    for order, node in enumerate(module.graph.nodes):
        nodes.set_origin(node, Origin(order=order, source=node.name))
    outputs = torch.utils._pytree.tree_leaves(module.graph.output_node().args[0])
    return Part(
        module,
        tuple(Port(Role.INPUT, str(number)) for number in range(inputs)),
        tuple(Port(Role.OUTPUT, f"output[{number}]") for number in range(len(outputs))),
    )


def by_hand(*steps: tuple[Any, tuple[Any, ...]], size: int = 4) -> Part:
    """A chain of operators, each given what the one before made and constants."""
    graph = fx.Graph()
    x = value = graph.placeholder("x")
    x.meta["val"] = torch.empty(size, size)
    for target, constants in steps:
        value = graph.call_function(target, (value, *constants))
        value.meta["val"] = torch.empty(size, size)
    graph.output((value,))
    return part_of(fx.GraphModule(nn.Module(), graph))


# ------------------------------------------------------------------------------------------------ what is known


def test_a_dtensor_all_to_all_of_a_gpu_is_communication() -> None:
    """As DTensor traces it on CUDA: it was compute, in no group and in no order of collectives."""
    with fake_world(2), FakeTensorMode() as mode:
        name = dist.group.WORLD.group_name
        with mode:
            x = torch.empty(4, 6, device="cuda")

        def resharded(x: torch.Tensor) -> tuple[torch.Tensor]:
            return (DTENSOR.shard_dim_alltoall(x * 2, 1, 0, name) + 1,)

        part = part_of(make_fx(resharded)(x))
        verify(part)
        (node,) = (n for n in part.graph.nodes if n.target is DTENSOR.shard_dim_alltoall.default)
        assert nodes.communicates(node) and not nodes.is_collective(node), "its result needs no wait"
        assert nodes.is_pinned(node), "it stays, also where nothing uses it"
        assert group_name(node) == name
        assert len(collective_order(part)) == 1 and "shard_dim_alltoall" in collective_order(part)[0]
        groups = {name: Group((1, 1), "nccl")}
        assert signature(node, groups).endswith("over 1+1 ranks nccl")
        assert classify(part, groups)[node] is Kind.COMPUTE, "it keeps the stream until it is done"
        with pytest.raises(VerifyError, match=f"runs in group '{name}'; known are none"):
            classify(part, {})


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("_c10d_functional::all_reduce", How.LAUNCHES),
        ("_c10d_functional::all_gather_into_tensor_coalesced", How.LAUNCHES),
        ("_c10d_functional_autograd::all_to_all_single", How.LAUNCHES),
        ("_c10d_functional::isend", How.LAUNCHES),
        ("_c10d_functional::helixrt_ring_shift", How.LAUNCHES),
        ("_dtensor::shard_dim_alltoall", How.BLOCKS),
        ("symm_mem::one_shot_all_reduce", How.BLOCKS),
        ("symm_mem::fused_all_gather_matmul", How.BLOCKS),
        ("symm_mem::_low_contention_all_gather", How.LAUNCHES),
    ],
)
def test_torchs_communicating_operators_are_known(name: str, how: How) -> None:
    namespace, _, short = name.partition("::")
    graph = fx.Graph()
    node = graph.call_function(getattr(getattr(torch.ops, namespace), short).default, (graph.placeholder("x"),))
    assert group_argument(node) == "group_name"
    found = communication.communication(node)
    assert found is not None and found.how is how
    assert nodes.communicates(node) and nodes.is_collective(node) == (how is How.LAUNCHES)


def test_every_operator_of_torch_that_takes_a_group_is_known_writes_or_is_refused() -> None:
    """Over all schemas there are: none that takes a process group passes for compute."""
    seen = Counter[str]()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, short = schema.name.partition("::")
        if namespace in ("aten", "prims", "prim", "helixtest") or not any("group" in a.name for a in schema.arguments):
            continue
        target = getattr(getattr(getattr(torch.ops, namespace), short), schema.overload_name or "default")
        node = fx.Graph().call_function(target)
        if group_argument(node) is None:
            numbers = ("int", "SymInt", "bool", "Optional[int]")
            assert all(str(a.type) in numbers for a in schema.arguments if "group" in a.name), schema
            continue
        try:
            seen["known" if nodes.communicates(node) else "not"] += 1
        except VerifyError:
            seen["refused"] += 1
    assert seen["known"] >= 9 and seen["refused"] >= 20 and seen["not"] == 0, seen


def test_ranks_measure_a_ring_shift_together_and_agree_on_its_direction(run_stages: Any, tmp_path: Path) -> None:
    """It sends and receives, and is the same operator on every rank: a collective to all passes."""
    shift, wait = C10D.helixrt_ring_shift.default, (C10D.wait_tensor.default, ())

    def work(rank: int) -> Any:
        name, group = NAMES[rank], group_named(NAMES[rank])
        part = by_hand((ATEN.mul.Tensor, (2.0,)), (shift, (1, name)), wait)
        verify(part)
        agree(part, group)
        with pytest.raises(DisagreementError, match="ring_shift.*1, this group.*ring_shift.*-1, this group"):
            agree(by_hand((shift, (1 - 2 * rank, name)), wait), group)
        with pytest.raises(VerifyError, match="without a wait"):
            verify(by_hand((shift, (1, name)), (ATEN.mul.Tensor, (2.0,))))
        found = profile(part, group, cache=tmp_path)
        (given,) = part.run({Port(Role.INPUT, "0"): torch.full((4, 4), float(rank))}).values()
        assert torch.equal(given, torch.full((4, 4), 2.0 * (1 - rank)))
        return found.times, [o.kind for o in found.operators(part)]

    (times, kinds), (other, _) = on_two_ranks(run_stages, NAMES, work)
    assert times == other and kinds == [Kind.COMPUTE, Kind.INTRA, Kind.WAIT]
    (shifted,) = (time for name, time in times.items() if "ring_shift" in name)
    assert shifted.measured and shifted.time_us > 0


# ------------------------------------------------------------------------------------------------ unknown operators


def test_an_unknown_operator_with_a_group_is_refused_and_never_run(run_stages: Any, tmp_path: Path) -> None:
    part = by_hand((ATEN.mul.Tensor, (2.0,)), (MINE.unknown.default, (NAMES[0],)))
    said = r"unknown_default calls helixtest::unknown, .* group \(tp_group\).*register\(.helixtest::unknown., how, group=.tp_g"
    with pytest.raises(VerifyError, match=said):
        verify(part)
    with pytest.raises(VerifyError, match=said):
        profile(part, cache=tmp_path)
    with pytest.raises(VerifyError, match=said):
        planned(part, part)
    assert not CALLS and not list(tmp_path.iterdir())


def test_a_group_as_a_value_is_seen_whatever_its_argument_is_called() -> None:
    graph = fx.Graph()
    value = dist.ProcessGroup(dist.HashStore(), 0, 1)
    node = graph.call_function(MINE.norm.default, (graph.placeholder("x"), 4, value))
    assert group_argument(node) == "mode"
    with pytest.raises(VerifyError, match="takes a process group"):
        nodes.communicates(node)


def test_numbers_called_group_are_no_groups() -> None:
    part = by_hand((MINE.norm.default, (4, "fast")))
    verify(part)
    assert not any(map(nodes.communicates, part.graph.nodes))


def test_what_is_said_not_to_communicate_is_compute(tmp_path: Path) -> None:
    register("helixtest::unknown", "does not communicate", group="tp_group")
    part = by_hand((MINE.unknown.default, (NAMES[0],)))
    verify(part)
    found = profile(part, cache=tmp_path)
    assert [time.measured for time in found.times.values()] == [True] and CALLS["unknown", NAMES[0]] > 0


def test_collectives_inside_a_branch_are_refused() -> None:
    """An operator that runs a graph of its own hides them from the order that ranks agree on."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return MINE.exchange(x, NAMES[0])

    def branching(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.cond(x.sum() > 0, body, torch.sin, (x,)),)

    part = part_of(make_fx(branching, tracing_mode="fake")(torch.ones(4, 4)))
    with pytest.raises(VerifyError, match="exchange communicates inside .*cond"):
        verify(part)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("exchange", "blocks"), "operator=exchange: must be namespace::name"),
        (("a::b", "sometimes"), "how=sometimes: must be one of launches, blocks, does not communicate"),
        (("_dtensor::shard_dim_alltoall", "launches"), "is described otherwise already"),
        (("helixtest::exchange", "launches"), "is described otherwise already"),
    ],
)
def test_wrong_descriptions_are_one_line(arguments: tuple[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        register(*arguments)


# ------------------------------------------------------------------------------------------------ blocking operators


def blocking(rank: int) -> Part:
    """A product, a blocking exchange, and an all-reduce that needs a wait."""
    name = NAMES[rank]
    steps = ((ATEN.mm.default, ()), (MINE.exchange.default, (name,)), (C10D.all_reduce.default, ("sum", name)))
    graph = fx.Graph()
    x = graph.placeholder("x")
    value = graph.call_function(steps[0][0], (x, x))
    for target, constants in steps[1:]:
        value = graph.call_function(target, (value, *constants))
    value = graph.call_function(C10D.wait_tensor.default, (value,))
    graph.output((graph.call_function(ATEN.add.Tensor, (value, 1)),))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(16, 16)
    return part_of(fx.GraphModule(nn.Module(), graph))


def test_ranks_run_a_blocking_operator_equally_often_while_they_profile(run_stages: Any, tmp_path: Path) -> None:
    """As compute it was run as often as each rank's own clock had it, and the slower rank waited for ever."""

    def work(rank: int) -> Any:
        part = blocking(rank)
        found = profile(part, group_named(NAMES[rank]), cache=tmp_path)
        return found.times, locate(part), found.operators(part)

    (times, groups, listed), (other, _, _) = on_two_ranks(run_stages, NAMES, work)
    assert times == other and CALLS["exchange", NAMES[0]] == CALLS["exchange", NAMES[1]] > 0
    (name,) = (name for name in times if "exchange" in name)
    assert name.endswith("over 2 ranks gloo") and times[name].measured
    assert groups == {NAMES[0]: Group((2,), "gloo")}
    (one,) = (operator for operator in listed if operator.signature == name)
    assert one.kind is Kind.COMPUTE and one.time_us > 0 and not one.movable


def test_nothing_hides_behind_a_blocking_operator(run_stages: Any, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        part = blocking(rank)
        found = profile(part, cache=tmp_path)
        exchanged, summed = (o for o in found.operators(part) if " over " in o.signature)
        return [found.overlap.factor(exchanged, summed), summed.kind in COMMUNICATION, dict(found.pairs)]

    for factor, communicates, pairs in on_two_ranks(run_stages, NAMES, work):
        assert factor == 0.0 and communicates
        assert not any("exchange" in name for names in pairs for name in names)


def test_a_plan_with_blocking_operators_is_woven_and_gives_the_same(run_stages: Any) -> None:
    def work(rank: int) -> None:
        part = blocking(rank)
        agree(part, group_named(NAMES[rank]))
        plan = planned(part, part, "estimate")
        woven = weave(part, part, plan.order)
        assert len(collective_order(woven)) == 4
        agree(woven, group_named(NAMES[rank]))
        values = {Port(Role.INPUT, "0", s): torch.full((16, 16), 0.1 * (s + rank + 1)) for s in range(2)}
        together = woven.run(values)
        for strand in range(2):
            alone = part.run({Port(Role.INPUT, "0"): values[Port(Role.INPUT, "0", strand)]})
            assert torch.equal(together[Port(Role.OUTPUT, "output[0]", strand)], alone[Port(Role.OUTPUT, "output[0]")])

    on_two_ranks(run_stages, NAMES, work)


def test_ranks_with_other_blocking_operators_are_told(run_stages: Any) -> None:
    def work(rank: int) -> None:
        name = NAMES[rank]
        steps = [(MINE.exchange.default, (name,))] if rank else [(ATEN.neg.default, ())]
        with pytest.raises(DisagreementError, match="nothing more.*helixtest.exchange"):
            agree(by_hand(*steps), group_named(name))

    on_two_ranks(run_stages, NAMES, work)


def test_what_cannot_be_run_on_made_up_arguments_is_estimated(run_stages: Any, tmp_path: Path) -> None:
    """Operators on registered memory, or with one rank's partner among the arguments."""
    communication.REGISTERED.clear()
    register("helixtest::exchange", "blocks", pattern="all_reduce", runnable=False)

    def work(rank: int) -> Any:
        return profile(blocking(rank), group_named(NAMES[rank]), cache=tmp_path).times

    times, other = on_two_ranks(run_stages, NAMES, work)
    assert times == other and not any(name == "exchange" for name, _ in CALLS)
    (found,) = (time for name, time in times.items() if "exchange" in name)
    assert not found.measured and found.time_us > 0


def test_a_blocking_operator_in_a_router_does_not_move() -> None:
    part = by_hand((MINE.exchange.default, (NAMES[0],)), (ATEN.mul.Tensor, (2.0,)))
    for node in part.graph.nodes:
        nodes.set_origin(node, Origin("layers.0.router", order=nodes.origin(node).order, source=node.name))
    assert {node.name for node in movable(part)} == {"mul_tensor"}
