"""Fused strands compute what their operators do, woven or not with the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import helixrt
from helixrt.passes.capture import capture
from helixrt.passes.classify import kind_of, movable, strand
from helixrt.passes.early import early
from helixrt.passes.errors import VerifyError
from helixrt.passes.fuse import fuse, groups
from helixrt.passes.fused import Fused
from helixrt.passes.inductor_private import compiled
from helixrt.passes.operators import Kind
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.split import split, whole_backward
from helixrt.passes.weave import alternating, weave
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk

SEQ, VOCAB = 6, 17


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def model(family: str, layers: int = 3) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ModelConfig(family=family, layers=layers, dim=8, heads=2, kv_heads=1, ffn=12, vocab=VOCAB, tied=True)
    module = build_chunk(config, SEQ, 0, 1, dtype=torch.float64)
    for block in module.layers.values():
        block.register_forward_hook(lambda m, args, out: F.dropout(out, 0.3, m.training))
    return module


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, VOCAB, (2, rows, SEQ), generator=torch.Generator().manual_seed(1)).unbind(0)


@pytest.fixture(scope="module", params=["gpt", "llama"])
def parts(request: pytest.FixtureRequest) -> tuple[nn.Module, Part, Part]:
    module = model(request.param)
    x, y = tokens(2)
    halves = split(capture(module, (x,), loss=cross_entropy, target=y))
    return module, halves.forward, early(whole_backward(halves))


class Recording:
    """A compiler that compiles nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        assert len(examples) == len(module.graph.find_nodes(op="placeholder"))
        assert all(isinstance(example, torch.Tensor) for example in examples)
        self.asked.append(module)
        return module


def test_fused_parts_give_the_same_bits(parts: tuple[nn.Module, Part, Part]) -> None:
    module, forward, backward = parts
    compiler = Recording()
    fused = [fuse(part, compiler) for part in (forward, backward)]
    weave(fused[0], fused[1], alternating(*fused))
    x, y = tokens(2)
    values = {Port(Role.INPUT, "0"): x, Port(Role.TARGET, "target"): y}
    values[Port(Role.TANGENT, "loss")] = torch.ones((), dtype=torch.float64)
    values |= {Port(Role.PARAMETER, name): p.detach() for name, p in module.named_parameters()}
    values |= {Port(Role.BUFFER, name): b for name, b in module.named_buffers()}
    results = []
    for first, second in ((forward, backward), tuple(fused)):
        torch.manual_seed(2)
        saved = first.run(values)
        results.append({**saved, **second.run({**values, **saved})})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][port]) for port, value in results[0].items())

    counts = [sum(isinstance(node.target, Fused) for node in strand(part)) for part in fused]
    assert min(counts) >= 3, "each layer has some"
    assert len(compiler.asked) < sum(counts), "layers alike share a function"
    assert all(kind_of(node, {}) is Kind.COMPUTE for part in fused for node in strand(part) if isinstance(node.target, Fused))


def test_what_stays_alone(parts: tuple[nn.Module, Part, Part]) -> None:
    """Weight gradients, which may move, and random operators, which draw in eager's order."""
    _, forward, backward = parts
    together = {node for part in (forward, backward) for group in groups(part) if len(group) > 1 for node in group}
    assert not any("dropout" in str(node.target) and "backward" not in str(node.target) for node in together)
    products = {node for node in movable(backward) if node.target is torch.ops.aten.mm.default}
    assert len(products) >= 8 and not products & together
    for part in (forward, backward):
        assert sorted(node.name for group in groups(part) for node in group) == sorted(node.name for node in strand(part))


def test_a_lost_operator_is_noticed(parts: tuple[nn.Module, Part, Part], monkeypatch: pytest.MonkeyPatch) -> None:
    _, forward, backward = parts
    random = next(node for node in strand(forward) if "dropout" in str(node.target))
    monkeypatch.setattr("helixrt.passes.fuse.groups", lambda part: [group for group in groups(part) if random not in group])
    with pytest.raises(VerifyError, match="would run before .*dropout"):
        fuse(forward, Recording())
    unused = groups(backward)[-1]
    monkeypatch.setattr("helixrt.passes.fuse.groups", lambda part: [*groups(part), unused])
    with pytest.raises(VerifyError, match="doubled"):
        fuse(backward, Recording())


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("factor", torch.tensor(2.0))  # without dimensions, inductor could take it for a number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.dropout(F.gelu(self.a(x)).sin() * self.factor, 0.3))


def compare(module: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Callable[..., torch.Tensor]) -> None:
    """Inductor woven and not, bitwise; and eager, to rounding."""
    found = []
    for options in ({"codegen": "inductor"}, {"codegen": "inductor", "strands": 1}, {}):
        each = helixrt.compile(copy.deepcopy(module), loss=loss, microbatches=2, **options)
        torch.manual_seed(5)
        losses = [each.train_step(x, target=y) for _ in range(2)]
        found.append((losses[1], [p.grad for p in each.parameters()], torch.get_rng_state(), each.explain()))
    assert torch.equal(found[0][0], found[1][0]) and all(map(torch.equal, found[0][1], found[1][1]))
    torch.testing.assert_close(found[0][0], found[2][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(found[0][1], found[2][1], rtol=1e-10, atol=1e-13)
    assert torch.equal(found[0][2], found[2][2])
    assert found[0][3].state == "woven" and found[0][3].counts["woven"]["compute"] < found[2][3].counts["woven"]["compute"]


@pytest.mark.system
def test_inductor_gives_eagers_numbers() -> None:
    compare(Small().double(), *(torch.randn(4, n, dtype=torch.float64) for n in (4, 3)), F.mse_loss)  # type: ignore[call-arg]


@pytest.mark.system
def test_a_compiled_function_takes_other_layouts_than_it_was_compiled_for() -> None:
    """Real operators do not always lay a result out as fake ones say."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, 3.0)),))
    function = compiled(torch.fx.GraphModule(nn.Module(), graph), [torch.empty(3, 4)])
    value = torch.randn(4, 3).t()
    assert torch.equal(function(value)[0], 3 * value)
    assert torch.equal(function(value.contiguous())[0], 3 * value)
