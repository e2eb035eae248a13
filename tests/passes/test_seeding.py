"""Seeded operators draw what their operator draws after `manual_seed`, also where a region computes them again."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.replay import replayed, set_state, state_of
from helixrt.passes.seeding import SEED, mixed, order_of, seed_of, seeded, seeded_operator
from helixrt.passes.split import split


def test_an_operator_draws_from_seed_and_number_alone() -> None:
    state, seed = torch.get_rng_state(), seed_of(3, 1)
    op = seeded_operator(torch.ops.aten.native_dropout.default)
    x = torch.ones(64)
    found = [op(seed, order, x.device, x, 0.5, True)[0] for order in (0, 1, 0)]
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(mixed(int(seed), 1))
    assert torch.equal(found[1], torch.native_dropout(x, 0.5, True)[0])


aten = torch.ops.aten
DRAWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rand": (aten.rand.default, ([33],)),
    "randn": (aten.randn.default, ([33],)),
    "randint": (aten.randint.low, (3, 9, [33])),
    "randperm": (aten.randperm.default, (33,)),
    "rand_like": (aten.rand_like.default, (torch.ones(4, 9).T,)),
    "bernoulli": (aten.bernoulli.p, (torch.ones(33), 0.3)),
    "normal": (aten.normal_functional.default, (torch.ones(33), 1.0, 2.0)),
    "multinomial": (aten.multinomial.default, (torch.ones(33), 7)),
    "dropout": (aten.native_dropout.default, (torch.rand(4, 9).T, 0.3, True)),
    "dropout of all": (aten.native_dropout.default, (torch.rand(9), 1.0, None)),
    "no dropout": (aten.native_dropout.default, (torch.rand(9), 0.3, False)),
}


@pytest.mark.parametrize("case", DRAWS)
def test_an_operator_draws_what_it_draws_after_manual_seed(case: str) -> None:
    drawn, arguments = DRAWS[case]
    seed, cpu = seed_of(5), torch.device("cpu")
    before = torch.get_rng_state()
    found = seeded_operator(drawn)(seed, 4, cpu, *arguments)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(mixed(int(seed), 4))
    expected = drawn(*arguments)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_thread_that_draws_meanwhile_gets_its_own_numbers() -> None:
    """As a loader that works ahead in a thread does: it draws from the process's generator."""
    seed, cpu, x = seed_of(5), torch.device("cpu"), torch.ones(1000)
    operators = [seeded_operator(DRAWS[case][0]) for case in ("dropout", "bernoulli")]
    torch.manual_seed(1)
    expected = torch.cat([torch.rand(1) for _ in range(20_000)])
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.rand(1) for _ in range(20_000)))
    thread.start()
    while thread.is_alive():
        for operator in operators:
            operator(seed, 1, cpu, x, 0.5, *((True,) if operator is operators[0] else ()))
    thread.join()
    assert torch.equal(torch.cat(found), expected)


def test_seeds_differ_by_any_number() -> None:
    seeds = {int(seed_of(seed, step, microbatch)) for seed in range(4) for step in range(4) for microbatch in range(4)}
    assert len(seeds) == 64 and seed_of(1).dtype is torch.int64 and not seed_of(1).dim()


class Region(nn.Module):
    """Dropout before and inside of a region that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.a(x), 0.3)
        return checkpoint(lambda h: F.dropout(torch.tanh(self.b(F.dropout(h, 0.5))), 0.4), x, use_reentrant=False).sum()


@pytest.fixture
def joint() -> Part:
    return capture(Region(), (torch.randn(4, 8),))


def test_what_is_computed_again_draws_the_same(joint: Part, values_of: Any, in_three: Any) -> None:
    part = seeded(joint)
    assert not any(map(nodes.is_random, part.graph.nodes)) and SEED in part.inputs
    orders = [order_of(node) for node in part.graph.nodes if order_of(node) is not None]
    assert sorted(set(orders)) == [0, 1, 2] and len(orders) > 3  # some of them are there again
    module = Region()
    values = values_of(module, {"0": torch.randn(4, 8)}) | {SEED: seed_of(7)}
    found = in_three(split(part), values)
    torch.manual_seed(1)
    assert all(torch.equal(value, found[port]) for port, value in in_three(split(part), values).items())
    x = values[Port(Role.INPUT, "0")]  # eager, with the numbers that the graph has
    masks = []
    for order, share in enumerate((0.3, 0.5, 0.4)):
        torch.manual_seed(mixed(int(seed_of(7)), order))
        masks.append(torch.native_dropout(torch.ones(4, 8), share, True)[0])
    (torch.tanh(module.b(module.a(x) * masks[0] * masks[1])) * masks[2]).sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[Port(Role.GRADIENT, name)], parameter.grad)


def test_a_graph_that_draws_nothing_stays() -> None:
    joint = capture(nn.Linear(3, 3), (torch.randn(2, 3),), loss=F.mse_loss, target=torch.randn(2, 3))
    assert seeded(joint) is joint


@pytest.mark.gpu
def test_operators_of_a_gpu_draw_from_seed_and_number_alone() -> None:
    device, seed, before = torch.device("cuda", torch.cuda.current_device()), seed_of(3, 1), state_of(torch.device("cuda"))
    heads = torch.randn(3, 2, 4, 64, 64, device=device, dtype=torch.bfloat16)
    cases: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (torch.ops.aten.native_dropout.default, (torch.ones(4096, device=device), 0.5, True)),
        (torch.ops.aten._scaled_dot_product_flash_attention.default, (*heads, 0.5)),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, (*heads, None, True, 0.5)),
    )
    for operator, given in cases:
        found = [seeded_operator(operator)(seed, order, device, *given)[0] for order in (0, 1, 0)]
        assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
        torch.manual_seed(mixed(int(seed), 1))
        assert torch.equal(found[1], operator(*given)[0])
        again = replayed(operator)(state_of(device), device, *given)[0]
        assert torch.equal(again, operator(*given)[0]), "the same state, the same numbers"
    set_state(device, before)
    seeded_operator(cases[0][0])(seed, 0, device, *cases[0][1])
    assert torch.equal(state_of(device), before)
