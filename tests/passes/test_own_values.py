"""Which values of a graph are a rank's own, and that random operators on them draw numbers of its own, also again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from helixrt.passes.capture import capture
from helixrt.passes.own_values import Axis, number_of, own_values
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.seeding import OWN, order_of, seeded

C10D, ATEN = torch.ops._c10d_functional, torch.ops.aten


def axis(group: str, rank: int, size: int, *names: str) -> Axis:
    return Axis(group, rank, size, lambda port: port.name in names)


def test_sums_and_gathers_make_equal_values_of_own_ones_along_their_axis() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    call: Callable[..., fx.Node] = graph.call_function
    both = call(ATEN.mul.Tensor, (x, w))
    summed = call(C10D.wait_tensor.default, (call(C10D.all_reduce.default, (both, "sum", "tp")),))
    gathered = call(C10D.wait_tensor.default, (call(C10D.all_gather_into_tensor.default, (summed, 2, "cp")),))
    scattered = call(C10D.wait_tensor.default, (call(C10D.reduce_scatter_tensor.default, (gathered, "sum", 2, "tp")),))
    elsewhere = call(C10D.wait_tensor.default, (call(C10D.all_reduce.default, (both, "sum", "another")),))
    constant = call(ATEN.ones.default, ([2],))
    graph.output((scattered, elsewhere, constant))
    ports = (Port(Role.INPUT, "x"), Port(Role.PARAMETER, "w"))
    part = Part(fx.GraphModule(nn.Module(), graph), ports, tuple(Port(Role.OUTPUT, name) for name in "abc"))
    found = own_values(part, [axis("tp", 0, 2, "w"), axis("cp", 0, 2, "x")])
    wanted = {x: {1}, w: {0}, both: {0, 1}, summed: {1}, gathered: set(), scattered: {0}, elsewhere: {0, 1}, constant: set()}
    assert {node: set(found[node]) for node in wanted} == wanted


def test_numbers_are_equal_for_ranks_with_equal_values_and_for_no_others() -> None:
    places = [(tp, cp) for tp in range(3) for cp in range(2)]
    for own in ((), (0,), (1,), (0, 1)):
        numbers = {(tp, cp): number_of([axis("tp", tp, 3), axis("cp", cp, 2)], own) for tp, cp in places}
        alike = {place: tuple(place[at] for at in own) for place in places}
        for a in places:
            for b in places:
                assert (numbers[a] == numbers[b]) == (alike[a] == alike[b])
    assert number_of([axis("tp", 2, 3)], ()) == 0
    every = {number_of([axis("tp", tp, 3), axis("cp", cp, 2)], own) for tp, cp in places for own in ((), (0,), (1,), (0, 1))}
    assert len(every) == 1 + 3 + 2 + 6, "those of an axis are not those of another one"


class Both(nn.Module):
    """Dropout of what is equal on all ranks, and of what is made with an own weight, in a region that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.a(x), 0.5)
        return checkpoint(lambda h: F.dropout(torch.tanh(self.b(h)), 0.5), x, use_reentrant=False).sum()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_drawn_for_own_values_has_the_rank_in_its_number(rank: int) -> None:
    joint = capture(Both(), (torch.randn(2, 4),))
    part = seeded(joint, [axis("tp", rank, 2, "b.weight", "b.bias")])
    orders = [order for node in part.graph.nodes if (order := order_of(node)) is not None]
    own = 1 + OWN * (rank + 1)
    assert set(orders) == {0, own} and orders.count(own) == 2, "the region draws it twice"
