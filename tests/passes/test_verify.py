"""The verifier finds every fault sown into a graph, and ranks whose collectives differ are told so in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx import Graph, GraphModule, Node

from helixrt.passes import nodes
from helixrt.passes.agree import agree, agree_on
from helixrt.passes.capture import capture
from helixrt.passes.errors import DisagreementError, VerifyError
from helixrt.passes.nodes import Origin
from helixrt.passes.parts import Part, Port, Role, Split
from helixrt.passes.ranks import Ranks
from helixrt.passes.split import split
from helixrt.passes.verify import collective_order, verify, verify_made_from, verify_split

C10D = torch.ops._c10d_functional


@pytest.fixture(scope="module")
def joint() -> Part:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 1))
    return capture(module, (torch.randn(2, 4, requires_grad=True),), loss=lambda out, target: out.sum(), target=None)


def edited(part: Part, edit: Callable[[Graph, dict[str, Node]], None]) -> Part:
    """A copy of `part` with its graph changed."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(part.graph, copies))
    for before, copy in copies.items():
        copy.meta = dict(before.meta)
    edit(graph, {node.name: node for node in graph.nodes})
    return replace(part, module=GraphModule(part.module, graph))


def test_a_part_as_captured_is_right(joint: Part) -> None:
    verify(edited(joint, lambda graph, named: None))
    verify_made_from((joint,), (joint,))


def test_a_dropped_operator(joint: Part) -> None:
    def drop(graph: Graph, named: dict[str, Node]) -> None:
        named["n_0_mm_grad"].replace_all_uses_with(named["n_0_addmm"])
        graph.erase_node(named["n_0_mm_grad"])

    broken = edited(joint, drop)
    verify(broken)
    with pytest.raises(VerifyError, match="n_0_mm_grad .aten.mm.default. is lost: 1 before the pass, 0 after"):
        verify_made_from((broken,), (joint,))


def test_a_doubled_operator(joint: Part) -> None:
    def double(graph: Graph, named: dict[str, Node]) -> None:
        with graph.inserting_after(named["n_0_addmm"]):
            graph.node_copy(named["n_0_addmm"], lambda n: n)

    with pytest.raises(VerifyError, match="n_0_addmm .* is doubled"):
        verify_made_from((edited(joint, double),), (joint,))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("n_0_addmm", lambda node, named: (*node.args[:2], named["n_3_t"]), "takes in .*n_3_t.* after .*n_0_t.* before"),
        ("n_1_native_layer_norm", lambda node, named: (*node.args[:-1], 0.5), "n_1_native_layer_norm .*0.5.*1e-05"),
        ("n_0_t", lambda node, named: (named["n_3_t"],), "n_0_t .*n_3_t"),
    ],
    ids=["another tensor", "another number", "a view of another tensor"],
)
def test_changed_arguments(joint: Part, name: str, arguments: Any, said: str) -> None:
    def change(graph: Graph, named: dict[str, Node]) -> None:
        before = named["n_3_t"]
        for needed in (*before.all_input_nodes, before):
            if needed.op != "placeholder":
                next(n for n in graph.nodes if n.op != "placeholder").prepend(needed)
        named[name].args = arguments(named[name], named)

    with pytest.raises(VerifyError, match=said):
        verify_made_from((edited(joint, change),), (joint,))


def test_changed_keywords_and_results(joint: Part) -> None:
    def keyword(graph: Graph, named: dict[str, Node]) -> None:
        node = next(n for n in graph.nodes if n.op == "call_function" and "sum" in str(n.target))
        node.kwargs = {**node.kwargs, "dtype": torch.float64}

    with pytest.raises(VerifyError, match="sum.* takes in .*float64"):
        verify_made_from((edited(joint, keyword),), (joint,))

    def exchanged(graph: Graph, named: dict[str, Node]) -> None:
        (results,) = graph.output_node().args
        graph.output_node().args = ((*results[1:], results[0]),)

    with pytest.raises(VerifyError, match="gives .* before"):
        verify_made_from((edited(joint, exchanged),), (joint,))


def test_an_order_that_breaks_a_dependency(joint: Part) -> None:
    def swap(graph: Graph, named: dict[str, Node]) -> None:
        named["n_0_addmm"].append(named["n_0_t"])

    with pytest.raises(VerifyError, match="n_0_addmm uses n_0_t, which comes after it"):
        verify(edited(joint, swap))


def test_ports_that_do_not_fit(joint: Part) -> None:
    with pytest.raises(VerifyError, match=f"{len(joint.inputs)} inputs and {len(joint.inputs) - 1} ports"):
        verify(replace(joint, inputs=joint.inputs[1:]))
    with pytest.raises(VerifyError, match="parameter '0.weight' is there 2 times"):
        verify(replace(joint, inputs=(Port(Role.PARAMETER, "0.weight"),) * 2 + joint.inputs[2:]))


def test_an_operator_that_writes(joint: Part) -> None:
    def write(graph: Graph, named: dict[str, Node]) -> None:
        with graph.inserting_after(named["n_0_addmm"]):
            graph.call_function(torch.ops.aten.add_.Tensor, (named["n_0_addmm"], 1))

    with pytest.raises(VerifyError, match="add_.* writes into n_0_addmm"):
        verify(edited(joint, write))


def test_a_split_that_forgets(joint: Part) -> None:
    halves = split(joint)
    verify_split(halves, joint)
    without = replace(halves.forward, outputs=halves.forward.outputs[:-1])
    with pytest.raises(VerifyError, match="outputs and"):
        verify_split(replace(halves, forward=without), joint)
    with pytest.raises(VerifyError, match="which nothing before it gives"):
        verify_split(Split.of(halves.forward, halves.weight, halves.backward), joint)


def test_a_split_that_loses_a_result(joint: Part) -> None:
    halves = split(joint)

    def without_last(graph: Graph, named: dict[str, Node]) -> None:
        output = graph.output_node()
        output.args = (output.args[0][:-1],)

    lost = replace(edited(halves.weight, without_last), outputs=halves.weight.outputs[:-1])
    with pytest.raises(VerifyError, match="comes out 0 times of F, B and W together"):
        verify_split(replace(halves, weight=lost), joint)


def test_random_operators_in_another_order() -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.rand_like(x) * torch.rand_like(x) + super().forward(x)).sum()

    joint = capture(Twice(4, 4), (torch.randn(2, 4),))
    halves = split(joint)

    def swap(graph: Graph, named: dict[str, Node]) -> None:
        first, second = (node for node in graph.nodes if nodes.is_random(node))
        first.prepend(second)

    with pytest.raises(VerifyError, match="do not run in the captured order"):
        verify_split(replace(halves, forward=edited(halves.forward, swap)), joint)


# ------------------------------------------------------------------------------------------------ collectives


STEPS: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "sum": (C10D.all_reduce.default, ("sum", "0"), "all_reduce"),
    "gather": (C10D.all_gather_into_tensor.default, (2, "0"), "all_gather"),
    "wait": (C10D.wait_tensor.default, (), "wait_tensor"),
    "use": (torch.ops.aten.mul.Tensor, (2.0,), "mul"),
}


def communicating(*steps: str, size: int = 4) -> Part:
    """A part from words: `sum`, `gather` launch, `wait` waits for the launch before, `use` multiplies."""
    graph = Graph()
    x = value = graph.placeholder("x")
    x.meta["val"] = torch.empty(size)
    for number, step in enumerate(steps):
        target, constants, name = STEPS[step]
        value = graph.create_node("call_function", target, (value, *constants), name=name)
        value.meta["val"] = torch.empty(size)
        nodes.set_origin(value, Origin(order=number, source=value.name))
    graph.output((value,))
    return Part(GraphModule(nn.Module(), graph), (Port(Role.INPUT, "x"),), (Port(Role.OUTPUT, "y"),))


def test_collectives_have_one_wait_before_their_use() -> None:
    verify(communicating("use", "sum", "wait", "use"))
    with pytest.raises(VerifyError, match="mul_1 uses all_reduce without a wait"):
        verify(communicating("use", "sum", "use", "use"))
    with pytest.raises(VerifyError, match="wait_tensor waits for mul .*, which launches nothing"):
        verify(communicating("use", "wait"))


def test_a_wait_before_its_launch() -> None:
    part = communicating("sum", "wait", "use")

    def early(graph: Graph, named: dict[str, Node]) -> None:
        named["all_reduce"].prepend(named["wait_tensor"])

    with pytest.raises(VerifyError, match="wait_tensor uses all_reduce, which comes after it"):
        verify(edited(part, early))


def test_two_waits_for_one_launch() -> None:
    def again(graph: Graph, named: dict[str, Node]) -> None:
        with graph.inserting_after(named["wait_tensor"]):
            second = graph.call_function(C10D.wait_tensor.default, (named["all_reduce"],))
        named["mul"].args = (second, 2.0)

    with pytest.raises(VerifyError, match="all_reduce has 2 waits"):
        verify(edited(communicating("sum", "wait", "use"), again))


def test_ranks_with_the_same_collectives_agree(run_stages: Any) -> None:
    part = communicating("sum", "wait", "gather", "wait")
    assert len(collective_order(part)) == 2
    run_stages(2, lambda rank, group: agree([part, part], group))
    run_stages(2, lambda rank, group: agree(communicating("use"), group))


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ((("sum", "wait", "gather", "wait"), ("gather", "wait", "sum", "wait")), "collective 0 is .*all_reduce.*all_gather"),
        ((("sum", "wait", "gather", "wait"), ("sum", "wait")), "collective 1 is .*all_gather.* 'nothing more' on rank 1"),
        ((("use",), ("sum", "wait")), "collective 0 is 'nothing more' on rank 0 and .*all_reduce"),
    ],
)
def test_ranks_that_differ_all_learn_where(orders: tuple[tuple[str, ...], ...], said: str, run_stages: Any) -> None:
    def rank(rank: int, group: Any) -> str:
        with pytest.raises(DisagreementError, match=said) as caught:
            agree(communicating(*orders[rank]), group)
        return str(caught.value)

    first, second = run_stages(2, rank)
    assert first == second


def test_shapes_are_part_of_the_order(run_stages: Any) -> None:
    def rank(rank: int, group: Any) -> None:
        with pytest.raises(DisagreementError, match=r"float32 \[4\].*float32 \[5\]"):
            agree(communicating("sum", "wait", size=4 + rank), group)

    run_stages(2, rank)


def test_other_groups_may_have_other_names() -> None:
    part = communicating("sum", "wait")
    assert collective_order(part, "0") == ("_c10d_functional.all_reduce.default torch.float32 [4], sum, this group",)
    assert collective_order(part, "7") == ("_c10d_functional.all_reduce.default torch.float32 [4], sum, group 0",)


def test_a_rank_that_does_not_answer_is_an_error(run_stages: Any) -> None:
    def rank(rank: int, group: Any) -> None:
        if rank == 0:
            with pytest.raises(DisagreementError, match="within 0.5 s"):
                agree_on(["sum"], group, arrival_s=0.5)

    run_stages(2, rank)


@pytest.mark.system
def test_a_rank_that_compiles_longer_than_the_deadline_is_waited_for(run_stages: Any) -> None:
    def rank(rank: int, group: Any) -> None:
        if rank:
            time.sleep(4.0)  # captures, compiles
        agree_on(["sum"], group, deadline_s=3.0)

    run_stages(2, rank)


def test_the_first_rank_alone_sends_its_word(run_stages: Any) -> None:
    class Counting:
        """A group that counts the bytes a rank hands to exchanges in which every rank sends."""

        def __init__(self, group: Any) -> None:
            self.group, self.bytes = group, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.group, name)

        def allgather(self, outputs: Any, inputs: Any, *rest: Any) -> Any:
            self.bytes += sum(tensor.nbytes for tensor in inputs)
            return self.group.allgather(outputs, inputs, *rest)

    said = {"text": "x" * 10_000, "numbers": [1, 2.5, None]}

    def rank(rank: int, group: Any) -> Any:
        counting = Counting(group)
        ranks = Ranks(counting)
        found = ranks.first_says(said if rank == 0 else {"something": "else"}), ranks.first_says(rank)
        return found, counting.bytes

    for found, sent in run_stages(3, rank):
        assert found == (said, 0) and sent < 100


def test_a_first_rank_that_says_nothing_is_an_error(run_stages: Any) -> None:
    def rank(rank: int, group: Any) -> None:
        if rank:
            with pytest.raises(DisagreementError, match="within 0.5 s"):
                Ranks(group, deadline_s=0.5).first_says(None)

    run_stages(2, rank)


def test_origins_survive_copies() -> None:
    assert isinstance(nodes.origin(fx.Graph().placeholder("x")), Origin)
