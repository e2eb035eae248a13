"""Operators are told apart by what they keep busy, layers by the modules' names, and what may move by who needs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from helixrt.parallel.group import Group as Rank
from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.classify import (
    Time,
    accumulations,
    classify,
    distinct,
    kind_of,
    movable,
    operators,
    strand,
    timed,
)
from helixrt.passes.errors import VerifyError
from helixrt.passes.groups import Group
from helixrt.passes.layers import layers
from helixrt.passes.operators import COMMUNICATION, Kind, Operator, Overlap
from helixrt.passes.parts import Part, Role, Split
from helixrt.passes.sequence import candidates
from helixrt.passes.signatures import signature
from helixrt.passes.split import split, whole_backward
from helixrt.passes.timing import simulate
from helixrt.passes.verify import returned
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import ParallelGroups

SEQ = 8
SMALL = ModelConfig(family="gpt", layers=3, dim=8, heads=2, kv_heads=1, ffn=16, vocab=17, experts=2, moe_every=2, capacity=1.0)
GROUPS = {"tp": Group((2,), "gloo"), "ep": Group((1, 1), "gloo")}


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def halves() -> Split:
    """A GPT of three layers, the second with experts, as the first of two tensor- and expert-parallel ranks has it."""
    groups = ParallelGroups(tp=Rank("tp", 0, 2), ep=Rank("ep", 0, 2))
    module = build_chunk(SMALL, SEQ, 0, 1, groups=groups)
    tokens = torch.arange(2 * SEQ).view(2, SEQ) % 17
    return split(capture(module, (tokens,), loss=cross_entropy, target=tokens.flip(1)))


@pytest.fixture(scope="module")
def both(halves: Split) -> tuple[Part, Part]:
    return halves.forward, whole_backward(halves)


def made(part: Part, groups: dict[str, Group] = GROUPS) -> list[Operator]:
    """The part with the same time for everything."""
    times = {name: Time(1.0) for name, _, _ in distinct([part], groups)}
    return operators(part, groups, times)


@pytest.mark.system
def test_communication_is_of_its_group(both: tuple[Part, Part]) -> None:
    for part in both:
        kinds = classify(part, GROUPS)
        found = {node: kind for node, kind in kinds.items() if nodes.is_collective(node)}
        assert {nodes.schema(node).name.rpartition("::")[2]: kind for node, kind in found.items()} == {
            "all_reduce": Kind.INTRA,
            "all_to_all_single": Kind.INTER,
        }
        assert sum(kind is Kind.WAIT for kind in kinds.values()) == len(found)
        crossed = classify(part, {"tp": Group((1, 1)), "ep": Group((2,))})
        assert all(crossed[node] is not kind for node, kind in found.items())
        with pytest.raises(VerifyError, match="runs in group 'tp'; known are ep"):
            classify(part, {"ep": GROUPS["ep"]})


def test_what_moves_no_data_is_free(both: tuple[Part, Part]) -> None:
    for part in both:
        for node, kind in classify(part, GROUPS).items():
            if str(node.target) in ("aten.t.default", "aten.transpose.int", "aten.unbind.int", "<built-in function getitem>"):
                assert kind is Kind.FREE, node
            if str(node.target) in ("aten.mm.default", "aten.addmm.default", "aten.gelu.default", "aten.clone.default"):
                assert kind is Kind.COMPUTE, node


@pytest.mark.parametrize(("turned", "expected"), [(False, Kind.FREE), (True, Kind.COMPUTE)])
def test_a_reshape_that_must_copy_is_compute(turned: bool, expected: Kind) -> None:
    graph = fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = torch.empty(4, 6, device="meta").t() if turned else torch.empty(6, 4, device="meta")
    reshape = graph.call_function(torch.ops.aten.reshape.default, (source, [24]))
    assert kind_of(reshape, {}) is expected


def test_layers_are_the_models(both: tuple[Part, Part]) -> None:
    for part in both:
        listed = made(part)
        for node, operator in zip(strand(part), listed, strict=True):
            pieces = nodes.origin(node).module.split(".")
            assert operator.layer == (int(pieces[1]) if pieces[0] == "layers" else None), (node, operator.layer)
        assert {operator.layer for operator in listed} == {None, 0, 1, 2}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["0", "1.0.a", "1.0.b", "1.1.a", "1.1.b", "2"], [None, 0, 0, 1, 1, None]),  # a Sequential around the blocks
        (["encoder.0.a", "encoder.1.a", "decoder.0.a", "decoder.1.a"], [0, 1, 2, 3]),
        (["h.7.a", "h.7.b", "h.7.mlp.experts.0.w", "h.7.mlp.experts.1.w", *9 * ["h.7.c"]], [7] * 13),
        (["", "head"], [None, None]),
    ],
)
def test_layers_of_other_makes(names: list[str], expected: list[int | None]) -> None:
    assert layers(names, [name.rpartition(".")[2] for name in names]) == expected


def test_movable_is_what_only_one_weight_or_the_router_needs(both: tuple[Part, Part]) -> None:
    forward, backward = both
    assert {nodes.origin(node).module for node in movable(forward)} == {"layers.1.moe.router"}
    free = movable(backward)
    for port, node in zip(backward.outputs, returned(backward), strict=True):
        if port.role is Role.GRADIENT and port.name.endswith(("qkv.weight", "ffn_in.weight", "ffn_out.weight")):
            assert nodes.storage_owner(node) in free, port
    chain = [node for node in strand(backward) if nodes.is_collective(node)]
    assert chain and not free.intersection(chain), "what earlier layers wait for stays"


def test_weight_gradients_of_a_middle_chunk_are_what_w_has() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    x = torch.randn(3, 4, requires_grad=True)
    halves = split(capture(module, (x,)))
    backward = whole_backward(halves)
    weight = {nodes.origin(node).source for node in strand(halves.weight) if not nodes.is_derived(node)}
    free = {nodes.origin(node).source for node in movable(backward) if not nodes.is_derived(node)}
    assert free == weight and free


@pytest.mark.system
def test_operators_are_the_graph(both: tuple[Part, Part]) -> None:
    for part in both:
        listed, graph, kinds = made(part), strand(part), classify(part, GROUPS)
        assert [operator.node for operator in listed] == [node.name for node in graph]
        for at, (operator, node) in enumerate(zip(listed, graph, strict=True)):
            assert all(need < at for need in operator.needs)
            assert not nodes.is_random(node), "attention without dropout draws nothing"
            assert {listed[need].node for need in operator.needs} == {n.name for n in node.all_input_nodes if n in graph}
            given = node in accumulations(part) and operator.kind is Kind.COMPUTE  # and added to what is there
            assert operator.time_us == float(timed(kinds[node])) + given
            assert operator.kind is (Kind.COMPUTE if given else kinds[node])
            assert (operator.bytes > 0) or operator.kind not in COMMUNICATION
            assert not operator.movable or operator.kind is Kind.COMPUTE


def test_the_search_takes_them(both: tuple[Part, Part]) -> None:
    strands = [made(part) for part in both]
    for at, listed in enumerate(strands):
        for line in candidates(listed):
            timing = simulate(strands[at : at + 1], [(0, index) for index in line.order], Overlap({}))
            work = sum(operator.time_us for operator in listed if operator.kind is Kind.COMPUTE)
            assert work <= timing.total_us <= sum(operator.time_us for operator in listed) + 1e-9


def test_what_was_not_profiled_is_an_error(both: tuple[Part, Part]) -> None:
    with pytest.raises(VerifyError, match="no time for .*; profile the part first"):
        operators(both[0], GROUPS, {})


def test_signatures_tell_shapes_and_groups_not_names(both: tuple[Part, Part]) -> None:
    first = {signature(node, GROUPS) for node, kind in classify(both[0], GROUPS).items() if timed(kind)}
    renamed = {"tp": GROUPS["tp"], "ep": replace(GROUPS["ep"], backend="nccl")}
    second = {signature(node, renamed) for node, kind in classify(both[0], renamed).items() if timed(kind)}
    assert {name.replace("nccl", "gloo") for name in second} == first != second
    assert len(first) < sum(timed(kind) for kind in classify(both[0], GROUPS).values()), "layers share operators"
