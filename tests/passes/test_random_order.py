"""Random operators of a strand draw in the captured order whatever pairing, policy and times choose: the same bits.

The model has parallel branches with dropout, a router that adds noise, and an all-reduce in every layer (over a real
Gloo group of one rank), so that both strands communicate and each has work whose place is free.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helixrt.parallel.collective_functions import enter, leave
from helixrt.passes import nodes
from helixrt.passes.baselines import BASELINES
from helixrt.passes.capture import capture
from helixrt.passes.classify import Time, distinct, operators, strand
from helixrt.passes.errors import VerifyError
from helixrt.passes.groups import Group
from helixrt.passes.operators import Operator
from helixrt.passes.pair import Rules, baseline, pair
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.sequence import candidates
from helixrt.passes.split import split, whole_backward
from helixrt.passes.timing import BACKWARD, FORWARD, Place
from helixrt.passes.weave import weave
from helixrt.pipeline.strands import planned
from tests.passes.strand_pairs import even

NAME = "draws-in-order"
GROUPS = {NAME: Group((1, 1), "gloo")}  # said to be on two hosts: there is something to hide
LAYERS = 3


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(NAME)
    torch._C._distributed_c10d._register_process_group(NAME, group)
    yield
    torch._C._distributed_c10d._unregister_process_group(NAME)


class Noisy(nn.Linear):
    """A router's scores with noise, which is drawn after the branches' dropouts in eager."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(x.shape[0], self.out_features)


class Layer(nn.Module):
    """Two branches with dropout, the second with the longer chain, and a router; the sum goes over the group."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.short, self.long, self.back = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.router = Noisy(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = enter(x, NAME)
        first = F.dropout(self.short(self.norm(x)), 0.3)
        second = self.back(F.gelu(F.dropout(self.long(x), 0.3)))
        share = self.router(x).softmax(-1)
        mixed = first * share[:, :1] + second * share[:, 1:]
        return x + F.dropout(leave(mixed, NAME), 0.1)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def halves(model: nn.Module) -> tuple[Part, Part]:
    found = split(capture(model, (torch.randn(4, 8),), loss=F.mse_loss, target=torch.randn(4, 8)))
    return found.forward, whole_backward(found)


@pytest.fixture(scope="module")
def lasting(model: nn.Module) -> dict[Port, torch.Tensor]:
    values: dict[Port, torch.Tensor] = {Port(Role.PARAMETER, name): p.detach() for name, p in model.named_parameters()}
    return values | {Port(Role.TANGENT, "loss"): torch.ones(())}


def timed_by(part: Part, seed: int) -> list[Operator]:
    """The part as a strand whose every operator takes a time of its own, drawn at random."""
    draw = random.Random(seed)
    listed = operators(part, GROUPS, {name: Time(1.0) for name, _, _ in distinct([part], GROUPS)})
    return [replace(one, time_us=one.time_us and 10 ** draw.uniform(0, 3), signature=f"{one.node}") for one in listed]


def drawn(part: Part, order: list[Place] | tuple[Place, ...], which: int) -> list[str]:
    listed = strand(part)
    return [listed[index].name for strand_of, index in order if strand_of == which and nodes.is_random(listed[index])]


def inputs_of(microbatch: int) -> dict[Port, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return {port: torch.randn(4, 8, generator=generator) for port in (Port(Role.INPUT, "0"), Port(Role.TARGET, "target"))}


@pytest.mark.parametrize("seed", range(30))
def test_every_line_draws_in_the_captured_order(halves: tuple[Part, Part], seed: int) -> None:
    forward, _ = halves
    expected = [node.name for node in strand(forward) if nodes.is_random(node)]
    assert len(expected) == 4 * LAYERS
    for line in candidates(timed_by(forward, seed)):
        assert drawn(forward, [(0, index) for index in line.order], 0) == expected, line.name


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["helix", *BASELINES])
@pytest.mark.parametrize("seed", range(5))
def test_pairings_give_the_bits_of_one_strand_after_the_other(
    halves: tuple[Part, Part], lasting: dict[Port, torch.Tensor], seed: int, policy: str
) -> None:
    forward, backward = halves
    strands = timed_by(forward, 2 * seed), timed_by(backward, 2 * seed + 1)
    overlap, rules = even(1.0), Rules(labels=500)
    found = pair(*strands, overlap, rules) if policy == "helix" else baseline(policy, *strands, overlap, rules)
    woven = weave(forward, backward, found.order)
    torch.manual_seed(5)
    first = forward.run({**lasting, **inputs_of(0)})
    saved = {port: value for port, value in first.items() if port.role is Role.SAVED}
    second = forward.run({**lasting, **inputs_of(1)})
    after = torch.get_rng_state()
    alone = backward.run({**lasting, **inputs_of(0), **saved})
    values = {**lasting, **inputs_of(1)}
    values |= {replace(port, strand=BACKWARD): value for port, value in {**lasting, **inputs_of(0), **saved}.items()}
    torch.manual_seed(5)
    forward.run({**lasting, **inputs_of(0)})
    together = woven.run(values)
    assert torch.equal(torch.get_rng_state(), after)
    for port, value in {**second, **{replace(p, strand=BACKWARD): v for p, v in alone.items()}}.items():
        assert torch.equal(together[port], value), port


def test_the_search_uses_both_kinds_of_order(halves: tuple[Part, Part]) -> None:
    """Chaining is no fence: routers still move past other compute, and the lines still differ."""
    forward, _ = halves
    lines = [candidates(timed_by(forward, seed)) for seed in range(30)]
    assert any(len(found) == 2 for found in lines)
    assert all(any("router" in line.operators[index].node for index in line.deferred) for found in lines for line in found)


def test_two_strands_that_both_draw_run_one_after_the_other(
    halves: tuple[Part, Part], lasting: dict[Port, torch.Tensor]
) -> None:
    """Which numbers each strand gets may not depend on measured times."""
    forward, _ = halves
    plan = planned(forward, forward, "estimate")
    woven = weave(forward, forward, plan.order)
    torch.manual_seed(5)
    first, second = (forward.run({**lasting, **inputs_of(number)}) for number in range(2))
    values = {replace(port, strand=BACKWARD): value for port, value in {**lasting, **inputs_of(0)}.items()}
    torch.manual_seed(5)
    together = woven.run({**lasting, **inputs_of(1), **values})
    for port, value in {**second, **{replace(p, strand=BACKWARD): v for p, v in first.items()}}.items():
        assert torch.equal(together[port], value), port
    with pytest.raises(VerifyError, match="draws random numbers before .* of strand 1, which must draw first"):
        weave(forward, forward, [(1 - which, index) for which, index in plan.order])


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_where_it_has_dropout(dropout: float) -> None:
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    joint = capture(Attention(dropout), (x,))
    state = torch.get_rng_state()
    joint.run({Port(Role.INPUT, "0"): x.detach(), Port(Role.TANGENT, "output"): torch.ones_like(x)})
    drew = not torch.equal(torch.get_rng_state(), state)
    assert any(map(nodes.is_random, strand(joint))) == drew == (dropout > 0)


def test_operators_of_a_gpu_draw_where_they_have_dropout_and_not_in_the_backward() -> None:
    """Their schemas tell; torch tags forward and backward alike."""
    ops = torch.ops.aten
    q, seed = (torch.fx.Graph().placeholder(name) for name in ("q", "seed"))
    graph = torch.fx.Graph()
    flash = ops._scaled_dot_product_flash_attention.default
    forwards = [graph.call_function(flash, (q, q, q, *dropout)) for dropout in ((), (0.0,), (0.1,))]
    assert [nodes.is_random(node) for node in forwards] == [False, False, True]
    said = graph.call_function(ops._scaled_dot_product_efficient_attention.default, (q, q, q, None, True), {"dropout_p": 0.1})
    assert nodes.is_random(said)
    backward = ops._scaled_dot_product_efficient_attention_backward.default
    grads = graph.call_function(backward, (q, q, q, q, None, q, q, seed, seed, 0.1, [True] * 4))
    assert torch.Tag.nondeterministic_seeded in backward.tags and not nodes.is_random(grads)


def test_an_order_that_draws_other_numbers_is_refused(halves: tuple[Part, Part]) -> None:
    forward, backward = halves
    first, second = [index for index, node in enumerate(strand(forward)) if nodes.is_random(node)][:2]
    needed = [second]
    for index in needed:
        before = [node for node in strand(forward)[index].all_input_nodes if node.op != "placeholder"]
        needed += [strand(forward).index(node) for node in before]
    assert first not in needed
    early = sorted(set(needed))
    order = [(FORWARD, index) for index in early]
    order += [(FORWARD, index) for index in range(len(strand(forward))) if index not in early]
    order += [(BACKWARD, index) for index in range(len(strand(backward)))]
    message = f"strand 0: {strand(forward)[second]} draws random numbers before {strand(forward)[first]}"
    with pytest.raises(VerifyError, match=message):
        weave(forward, backward, order)
