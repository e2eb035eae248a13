"""On two real ranks: chunks of a model that DTensor shares among them, captured without memory, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from helixrt.compile.fake_model import capture_whole
from helixrt.passes import nodes
from helixrt.passes.agree import agree_on
from helixrt.passes.cut import CutModel, cut
from helixrt.passes.parts import Port, Role, local
from helixrt.passes.split import split

RANKS, LAYERS, SEQ, VOCAB = 2, 4, 6, 16
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "a")
ROWS = ("o_proj", "down_proj", "b")


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dense() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def shared(model: nn.Module) -> nn.Module:
    """A copy whose matrices lie in columns and rows on the ranks."""
    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    styles: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
    last = {name: name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    return parallelize_module(model, mesh, {name: styles[piece] for name, piece in last.items() if piece in styles})


def trained(model: CutModel, lasting: dict[Port, torch.Tensor], inputs: dict[str, torch.Tensor]) -> dict[Port, torch.Tensor]:
    """Forward and backward of one micro-batch over all chunks: the loss and the gradients."""
    given = {Port(Role.INPUT, name): value for name, value in inputs.items()}
    x, held, results = None, [], {}
    for chunk in model.chunks:
        halves = split(chunk.part)
        values = lasting | {each.port: given[each.source] for each in chunk.inputs}
        if x is not None:
            values[Port(Role.INPUT, "0")] = x
        values |= halves.forward.run(values)
        x = values[Port(Role.OUTPUT, "loss" if chunk.after is None else "output")]
        held.append((chunk, halves, values))
    results[Port(Role.OUTPUT, "loss")], tangent = x, torch.ones_like(x)
    for chunk, halves, values in reversed(held):
        values[Port(Role.TANGENT, "loss" if chunk.after is None else "output")] = tangent
        for part in (halves.backward, halves.weight):
            values |= part.run(values)
        tangent = values.get(Port(Role.INPUT_GRADIENT, "0"))
        results |= {Port(Role.GRADIENT, name): values[Port(Role.GRADIENT, name)] for name in chunk.gradients}
    return results


def check_shared(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, torch.Tensor], boundaries: Any) -> None:
    output = model(*args, **kwargs)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    other = shared(model)
    joint = capture_whole(other, args, kwargs)
    made = cut(joint, boundaries)
    agree_on(made.lines, dist.group.WORLD)
    assert all(any(map(nodes.communicates, chunk.part.graph.nodes)) for chunk in made.chunks)
    lasting = {Port(Role.PARAMETER, name): local(p.detach()) for name, p in other.named_parameters()}
    lasting |= {Port(Role.BUFFER, name): local(b) for name, b in other.named_buffers()}
    found = trained(made, lasting, {str(name): value for name, value in (*enumerate(args), *kwargs.items())})
    assert abs(float(found[Port(Role.OUTPUT, "loss")] - loss)) < 1e-14
    for name, parameter in model.named_parameters():
        gradient = found[Port(Role.GRADIENT, name)]
        if name in joint.layouts:
            gradient = joint.layouts[name].wrap(gradient).full_tensor()
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")


def dense() -> None:
    torch.manual_seed(0)
    check_shared(Tower().double(), (torch.randn(4, 8, dtype=torch.float64),), {}, ["layers.1", "layers.3"])


def llama() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    small = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "max_position_embeddings": SEQ, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(tie_word_embeddings=False, **small)
    tokens = torch.arange(2 * SEQ).view(2, SEQ) % VOCAB
    model = transformers.LlamaForCausalLM(config).double().train()
    check_shared(model, (), {"input_ids": tokens, "labels": tokens.clone()}, (3,))


def check(name: str) -> None:
    {"dense": dense, "llama": llama}[name]()


@pytest.mark.system
@pytest.mark.parametrize("name", ["dense", pytest.param("llama", marks=pytest.mark.slow)])
def test_two_ranks(name: str, ask_ranks: Any) -> None:
    ask_ranks(check, [name]).check(name)
