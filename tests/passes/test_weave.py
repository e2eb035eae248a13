"""Two strands woven give bitwise what they give one after the other, in any order their needs allow, and no more memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from helixrt.passes.capture import capture
from helixrt.passes.classify import strand
from helixrt.passes.early import early
from helixrt.passes.errors import VerifyError
from helixrt.passes.executable import Executable
from helixrt.passes.flat import flat, lying_in, usage
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.split import split, whole_backward
from helixrt.passes.timing import BACKWARD, FORWARD, Place
from helixrt.passes.verify import verify
from helixrt.passes.weave import alternating, weave


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.b(F.gelu(self.a(self.norm(x)))), 0.2)


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


@pytest.fixture(scope="module")
def halves() -> tuple[Part, Part]:
    """Forward and whole backward of six blocks that have a constant of their own."""
    torch.manual_seed(0)

    class Shifted(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    model = Shifted(*(Block() for _ in range(6)))
    parts = split(capture(model, (torch.randn(3, 8),), loss=square, target=torch.randn(3, 8)))
    backward = whole_backward(parts)
    values: dict[Port, torch.Tensor] = {Port(Role.PARAMETER, name): p.detach() for name, p in model.named_parameters()}
    values[Port(Role.TANGENT, "loss")] = torch.ones(())
    parts.forward.module.test_values = backward.module.test_values = values  # the parameters, for `run_all`
    return parts.forward, backward


def some_order(parts: tuple[Part, Part], seed: int) -> list[Place]:
    """A random merge of both strands, each in a random order that its needs and its random operators allow."""
    choose = random.Random(seed)
    order: list[Place] = []
    left = [list(strand(part)) for part in parts]
    done: list[set[fx.Node]] = [set(part.graph.find_nodes(op="placeholder")) for part in parts]
    place = [{node: index for index, node in enumerate(strand(part))} for part in parts]
    while any(left):
        which = choose.choice([w for w in (FORWARD, BACKWARD) if left[w]])
        ready = [n for n in left[which] if all(before in done[which] for before in n.all_input_nodes)]
        drawing = [n for n in left[which] if "dropout" in str(n.target)]
        node = choose.choice([n for n in ready if n not in drawing[1:]])
        left[which].remove(node)
        done[which].add(node)
        order.append((which, place[which][node]))
    return order


def inputs_of(microbatch: int) -> dict[Port, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    ports = Port(Role.INPUT, "0"), Port(Role.TARGET, "target")
    return {port: torch.randn(3, 8, generator=generator) for port in ports}


def shifted(values: Mapping[Port, torch.Tensor], which: int) -> dict[Port, torch.Tensor]:
    return {replace(port, strand=which): value for port, value in values.items()}


@pytest.mark.parametrize("seed", range(4))
def test_any_order_gives_the_same_bits(halves: tuple[Part, Part], seed: int) -> None:
    forward, backward = halves
    lasting = forward.module.test_values
    torch.manual_seed(5)
    first = forward.run({**lasting, **inputs_of(0)})
    saved = {port: value for port, value in first.items() if port.role is Role.SAVED}
    second = forward.run({**lasting, **inputs_of(1)})
    alone = backward.run({**lasting, **inputs_of(0), **saved})

    woven = weave(forward, backward, some_order(halves, seed))
    verify(woven)
    assert [stamp.name for stamp in woven.stamps][-1] == "weave"
    assert all(port.strand == 0 for port in woven.inputs if port.role is Role.PARAMETER)
    values = {**lasting, **inputs_of(1), **shifted({**lasting, **inputs_of(0), **saved}, BACKWARD)}
    torch.manual_seed(5)
    forward.run({**lasting, **inputs_of(0)})  # what the first micro-batch draws
    together = woven.run(values)
    assert together.keys() == {*second, *shifted(alone, BACKWARD)}
    for port, value in {**second, **shifted(alone, BACKWARD)}.items():
        assert torch.equal(together[port], value), port


def test_orders_that_cannot_be_are_refused(halves: tuple[Part, Part]) -> None:
    forward, backward = halves
    order = alternating(forward, backward)
    with pytest.raises(VerifyError, match="strand 1: .* is never issued"):
        weave(forward, backward, [place for place in order if place != (BACKWARD, len(strand(backward)) - 1)])
    with pytest.raises(VerifyError, match="is issued twice"):
        weave(forward, backward, [order[0], *order])
    with pytest.raises(VerifyError, match="strand 0: .* would run before .*, which it needs"):
        weave(forward, backward, [order[-1], *order[:-1]] if order[-1][0] == FORWARD else order[::-1])
    with pytest.raises(VerifyError, match="operators, the order asks for number 100000"):
        weave(forward, backward, [(FORWARD, 100000)])


def test_code_reads_as_python_and_frees_at_last_use(halves: tuple[Part, Part]) -> None:
    forward, backward = halves
    woven = weave(forward, backward, alternating(forward, backward))
    assert "f_n_0_norm" in woven.code() and "b_n_5_b" in woven.code() and "class Woven" in woven.code()
    code = Executable(woven).module.code
    assert "values.pop()" in code and "gradients.give('0.norm.weight'" in code
    gelu = next(line for line in code.splitlines() if line.strip().startswith("b_n_0_gelu_backward ="))
    assert "= None" in gelu


class Sums:
    """Gradients added up by name."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def give(self, name: str, gradient: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient


def test_an_executable_empties_what_it_is_given(halves: tuple[Part, Part]) -> None:
    forward, backward = halves
    lasting = forward.module.test_values
    saved: dict[Port, Any] = {}
    for port, value in Executable(forward)({**lasting, **inputs_of(0)}.__getitem__, Sums()):
        saved[port] = value
    expected = backward.run({**lasting, **inputs_of(0), **saved})
    known, sums = {**lasting, **inputs_of(0)}, Sums()
    left = Executable(backward)(lambda port: saved.pop(port) if port.role is Role.SAVED else known[port], sums)
    assert left == [] and all(port.role is not Role.SAVED for port in saved)
    assert all(torch.equal(sums.sums[port.name], value) for port, value in expected.items())


def test_a_flat_order_needs_no_more_than_one_strand(halves: tuple[Part, Part]) -> None:
    forward, backward = halves
    counts = [len(strand(part)) for part in halves]
    greedy = [(FORWARD, i) for i in range(counts[0])] + [(BACKWARD, i) for i in range(counts[1])]
    order = flat(forward, backward, greedy, slack=1.0)
    assert sorted(order) == sorted(greedy)
    for which in (FORWARD, BACKWARD):
        assert [index for w, index in order if w == which] == list(range(counts[which]))
    apart = usage(forward, range(counts[0])), usage(backward, range(counts[1]), lying_in(forward))
    limit = max(each.peak for each in apart)
    at = [0, 0]
    for which, _ in order:
        assert apart[which].during[at[which]] + apart[1 - which].before[at[1 - which]] <= limit
        at[which] += 1
    switches = sum(one[0] != other[0] for one, other in zip(order, order[1:], strict=False))
    assert switches > 6, "the forward proceeds while the backward runs, not after it"


def test_gradients_are_finished_where_they_are_made(halves: tuple[Part, Part]) -> None:
    _, backward = halves
    sooner = early(backward)
    code = Executable(sooner).module.code.splitlines()
    products = [at for at, line in enumerate(code) if "mm.default" in line and "grad_1 =" in line]
    given = [at for at, line in enumerate(code) if "gradients.give(" in line and ".weight'" in line and "norm" not in line]
    assert len(products) == len(given) == 12
    assert all(0 < later - at <= 4 for at, later in zip(products, given, strict=True)), (products, given)
    late = [at for at, line in enumerate(Executable(backward).module.code.splitlines()) if "gradients.give(" in line]
    assert late[0] > given[0]
