"""Attention over a ring of ranks is attention to the whole sequence, holds two foreign parts, and can be captured and woven.

The oracle is `scaled_dot_product_attention` on one rank; graphs are compared with each other bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from helixrt.compile.fake_world_private import fake_world
from helixrt.parallel.attention import causal_attention, context_part
from helixrt.parallel.flash_private import attend, attend_backward, products, products_backward
from helixrt.parallel.group import Group
from helixrt.parallel.ring_attention import ring_attention
from helixrt.passes import nodes
from helixrt.passes.agree import agree
from helixrt.passes.capture import capture
from helixrt.passes.classify import classify
from helixrt.passes.early import early
from helixrt.passes.estimate import ring_bytes
from helixrt.passes.groups import Group as Placed
from helixrt.passes.hide import hide
from helixrt.passes.operators import COMMUNICATION, Kind
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.split import split, whole_backward
from helixrt.passes.verify import collective_order, verify
from helixrt.passes.weave import weave
from helixrt.pipeline.strands import planned
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import ParallelGroups
from tests.train.model_ranks import GPT, LLAMA, SEQ, batch, gradients, on_ranks

SHIFT = torch.ops._c10d_functional.helixrt_ring_shift.default
HEADS, SHARED, HEAD_DIM, LENGTH = 4, 2, 8, 24


def sequences(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v of whole sequences, and a gradient of the output."""
    generator = torch.Generator().manual_seed(4)
    heads = (HEADS, HEADS // SHARED, HEADS // SHARED, HEADS)
    return [torch.randn(2, count, LENGTH, HEAD_DIM, generator=generator, dtype=dtype) for count in heads]


def whole_again(parts: list[torch.Tensor]) -> torch.Tensor:
    """What ranks hold of a sequence, in its order."""
    early_pieces, late_pieces = zip(*(part.chunk(2, 2) for part in parts), strict=True)
    return torch.cat((*early_pieces, *reversed(late_pieces)), 2)


@pytest.mark.parametrize("context", ["gathered", "ring"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_is_attention_to_the_whole_sequence(run_stages: Any, ranks: int, context: str) -> None:
    q, k, v, tangent = sequences()
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    repeated = [leaves[0], *(each.repeat_interleave(SHARED, 1) for each in leaves[1:])]
    expected = F.scaled_dot_product_attention(*repeated, is_causal=True)
    expected.backward(tangent)

    def work(cp: Group) -> list[torch.Tensor]:
        mine = [context_part(each, 2, cp).requires_grad_() for each in (q, k, v)]
        out = causal_attention(*mine, cp, context)
        out.backward(context_part(tangent, 2, cp))
        return [out.detach(), *(each.grad for each in mine)]

    results = zip(*on_ranks(run_stages, ranks, work), strict=True)
    for got, want in zip(results, [expected.detach(), *(each.grad for each in leaves)], strict=True):
        torch.testing.assert_close(whole_again(list(got)), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_ranks_lose_no_more_than_one_rank_does(run_stages: Any, dtype: torch.dtype) -> None:
    q, k, v, tangent = sequences()

    def errors(results: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> list[float]:
        return [(got.double() - want).abs().max().item() for got, want in zip(results, exact, strict=True)]

    def on_one_rank(of: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(of, copy=True).requires_grad_() for each in (q, k, v)]
        out = causal_attention(*leaves, None, "ring")
        out.backward(tangent.to(of))
        return [out.detach(), *(each.grad for each in leaves)]

    def work(cp: Group) -> list[torch.Tensor]:
        mine = [context_part(each.to(dtype), 2, cp).requires_grad_() for each in (q, k, v)]
        out = ring_attention(*mine, cp)
        assert out.dtype == dtype
        out.backward(context_part(tangent.to(dtype), 2, cp))
        return [out.detach(), *(each.grad for each in mine)]

    exact = on_one_rank(torch.float64)
    got = [whole_again(list(parts)) for parts in zip(*on_ranks(run_stages, 4, work), strict=True)]
    for ring, alone in zip(errors(got, exact), errors(on_one_rank(dtype), exact), strict=True):
        assert ring <= 3 * alone, (ring, alone)


def test_autocast_casts_as_it_does_on_one_rank(run_stages: Any) -> None:
    """Queries and keys may come in float32, from tables of positions, where values do not."""
    q, k, v, _ = sequences(torch.float32)

    def work(cp: Group) -> list[torch.Tensor]:
        mine = [context_part(each, 2, cp) for each in (q, k, v.bfloat16())]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [causal_attention(*mine, cp, context) for context in ("ring", "gathered")]

    for ring, gathered in on_ranks(run_stages, 2, work):
        assert ring.dtype == gathered.dtype == torch.bfloat16
        torch.testing.assert_close(ring, gathered, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "device,dtype,tolerance",
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.float32, 1e-5),
        pytest.param("cuda", torch.float32, 1e-4, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 4e-2, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 6e-3, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_fused_attention_is_that_by_matrix_products(device: str, dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    """Output, denominators and gradients, for queries and keys of different counts; in half precision against float64."""
    queries, keys = (12, 12) if causal else (6, 12)
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 3, count, HEAD_DIM) for count in (queries, keys, keys, queries)]
    q, k, v, tangent = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    out, denominator = attend(q, k, v, causal)
    wide = [each.double() for each in (q, k, v, tangent)]
    exact, exact_denominator = products(*wide[:3], causal)
    assert out.dtype == dtype and denominator.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(denominator.double(), exact_denominator, rtol=tolerance, atol=tolerance)
    found = attend_backward(tangent, q, k, v, out, denominator, causal)
    for one, other in zip(found, products_backward(wide[3], *wide[:3], exact, exact_denominator, causal), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ memory


class Foreign(TorchDispatchMode):
    """The most bytes of other ranks' keys and values, and of gradients that travel, that lived at once on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[str, list[tuple[StorageWeakRef, int]]] = {"pieces": [], "gradients": []}
        self.most = {"pieces": 0, "gradients": 0}
        self.launched = {"pieces": 0, "gradients": 0}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function is SHIFT:
            sent = StorageWeakRef(args[0].untyped_storage())
            known = any(each == sent for each, _ in self.alive["pieces"])
            # The first to go, in forward and in backward, are this rank's own keys and values.
            which = "pieces" if known or args[0] is self.mine else "gradients"
            self.launched[which] += 1
            self.alive[which].append((StorageWeakRef(result.untyped_storage()), result.nbytes))
        for which, held in self.alive.items():
            held[:] = [(each, size) for each, size in held if not each.expired()]
            self.most[which] = max(self.most[which], sum(size for _, size in held))
        if function is torch.ops.aten.stack.default and not hasattr(self, "mine"):
            self.mine = result
        return result


def test_no_rank_holds_more_than_two_foreign_parts(run_stages: Any) -> None:
    """Of keys and values, in forward and in backward; of their gradients neither."""
    ranks = 4

    def work(cp: Group) -> Foreign:
        q, k, v, tangent = (context_part(each, 2, cp) for each in sequences())
        q, k, v = (each.requires_grad_() for each in (q, k, v))
        with Foreign() as watch:
            ring_attention(q, k, v, cp).backward(tangent)
        watch.part = k.nbytes + v.nbytes
        return watch

    for watch in on_ranks(run_stages, ranks, work):
        assert watch.launched == {"pieces": 2 * (ranks - 1), "gradients": ranks}
        assert watch.most == {"pieces": 2 * watch.part, "gradients": 2 * watch.part}
        assert all(each.expired() for each, _ in watch.alive["pieces"])


# ------------------------------------------------------------------------------------------------ graphs


def captured(cp: Group, family: str = "llama", layers: int = 1) -> tuple[nn.Module, Part]:
    model = replace(LLAMA if family == "llama" else GPT, layers=layers, context="ring")
    module = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=ParallelGroups(cp=cp))
    x, y = (context_part(each, 1, cp) for each in (batch()[:, :-1], batch()[:, 1:]))
    return module, capture(module, (x,), loss=token_loss, target=y)


def shifts(part: Part) -> list[fx.Node]:
    return [node for node in part.graph.nodes if node.target is SHIFT]


def of_pieces(graph: fx.Graph) -> list[fx.Node]:
    """The shifts that carry keys and values: what this rank sends first, and what it sends on as it came."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is SHIFT:
            sent = node.args[0]
            own = sent.op == "placeholder" or not nodes.origin(node).backward
            if own or (nodes.is_wait(sent) and sent.args[0] in found):
                found.append(node)
    return found


def most_alive(graph: fx.Graph, results: list[fx.Node]) -> int:
    """How many of these shifts' results live at once, if each is freed at its last use."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    last = {result: order[result] for result in results}
    for node in graph.nodes:
        for taken in node.all_input_nodes:
            owner = nodes.storage_owner(taken)
            launch = owner.args[0] if nodes.is_wait(owner) else owner
            if launch in last:
                last[launch] = order[node]
    return max(sum(order[each] <= place <= last[each] for each in results) for place in order.values())


@pytest.mark.system
def test_ranks_capture_the_same_operators_and_hold_two_foreign_parts() -> None:
    """Four ranks' graphs, captured one after the other: sizes of splits are all that differs."""
    ranks = 4
    with fake_world(ranks):
        name = dist.group.WORLD.group_name
        joints = [captured(Group(name, rank, ranks))[1] for rank in range(ranks)]
    assert len({collective_order(joint, name) for joint in joints}) == 1
    placed = {name: Placed((ranks,), "gloo")}
    kinds = [[(str(node.target), kind) for node, kind in classify(joint, placed).items()] for joint in joints]
    assert all(each == kinds[0] for each in kinds)
    for joint in joints:
        halves = split(joint)
        backward = early(whole_backward(halves))
        for part, count, carried in ((halves.forward, ranks - 1, ranks - 1), (backward, ranks - 1 + ranks, ranks - 1)):
            verify(part)
            assert len(shifts(part)) == count and len(of_pieces(part.graph)) == carried
            assert {classify(part, placed)[shift] for shift in shifts(part)} == {Kind.INTRA}
            hidden = hide(part.module)
            for graph in (part.graph, hidden.graph):
                assert most_alive(graph, of_pieces(graph)) == 2
                gradients = [n for n in graph.nodes if n.target is SHIFT and n not in of_pieces(graph)]
                assert not gradients or most_alive(graph, gradients) <= 2


def test_a_shift_puts_what_it_sends_on_the_wire_once() -> None:
    assert [ring_bytes("ring_shift", 100.0, size) for size in (2, 4, 8)] == [100.0] * 3


def between(part: Part, kinds: dict[fx.Node, Kind]) -> list[int]:
    """For each shift how many compute operators are issued between its launch and its wait."""
    listed = [node for node in part.graph.nodes if node in kinds]
    found = []
    for shift in (node for node in listed if kinds[node] in COMMUNICATION):
        (wait,) = shift.users
        found.append(sum(kinds[node] is Kind.COMPUTE for node in listed[listed.index(shift) : listed.index(wait)]))
    return found


def check(name: str) -> None:
    """On this rank of two: captured, agreed, split and woven, each equal to the one before."""
    family, _, wanted = name.partition(" ")
    cp = Group.of(dist.group.WORLD)
    assert cp is not None
    module, joint = captured(cp, family, layers=2)
    halves = split(joint)
    forward, backward = halves.forward, early(whole_backward(halves))
    agree([joint, halves.forward, halves.backward, halves.weight, backward], dist.group.WORLD)

    loss = token_loss(module(context_part(batch()[:, :-1], 1, cp)), context_part(batch()[:, 1:], 1, cp))
    loss.backward()
    first, second = (values(module, seed, cp) for seed in (3, 4))
    alone = joint.run(first)
    assert torch.equal(alone[Port(Role.OUTPUT, "loss")], loss.detach())
    for parameter, gradient in gradients(module).items():
        torch.testing.assert_close(alone[Port(Role.GRADIENT, parameter)], gradient, rtol=1e-12, atol=1e-15)

    known = dict(first)
    for part in (halves.forward, halves.backward, halves.weight) if wanted == "split" else (forward, backward):
        known |= part.run(known)
    assert all(torch.equal(known[port], value) for port, value in alone.items())

    if wanted == "woven":
        plan = planned(forward, backward, "estimate")
        woven = weave(forward, backward, plan.order)
        agree(woven, dist.group.WORLD)
        saved = first | forward.run(first)
        of_strand = {0: second, 1: saved}
        given = {port: of_strand[port.strand][Port(port.role, port.name)] for port in woven.inputs}
        together = woven.run(given)
        expected = {0: forward.run(second), 1: backward.run(saved)}
        assert together and all(torch.equal(got, expected[p.strand][Port(p.role, p.name)]) for p, got in together.items())
        groups = {cp.name: Placed((2,), "gloo")}
        hidden = between(woven, classify(woven, groups))
        apart = [count for part in (forward, backward) for count in between(part, classify(part, groups))]
        assert len(hidden) == len(apart) == 2 * 4
        assert 0 in apart and all(hidden), "gradients that come home have nothing to hide behind but the other strand"


def values(module: nn.Module, seed: int, cp: Group) -> dict[Port, torch.Tensor]:
    tokens = batch(seed)
    known = {Port(Role.PARAMETER, name): p.detach() for name, p in module.named_parameters()}
    known |= {Port(Role.BUFFER, name): b for name, b in module.named_buffers()}
    known |= {
        Port(Role.INPUT, "0"): context_part(tokens[:, :-1], 1, cp),
        Port(Role.TARGET, "target"): context_part(tokens[:, 1:], 1, cp),
    }
    return known | {Port(Role.TANGENT, "loss"): torch.ones((), dtype=torch.float64)}


CASES = ("llama split", "gpt woven", "llama woven")


@pytest.fixture(scope="module")
def answers(ask_ranks: Any) -> Any:
    return ask_ranks(check, CASES)


@pytest.mark.system
@pytest.mark.parametrize("name", CASES)
def test_graphs_are_the_ring_bit_for_bit(name: str, answers: Any) -> None:
    answers.check(name)
