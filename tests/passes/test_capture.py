"""A captured graph computes what eager PyTorch computes, ports named, or says what stands in the way."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helixrt.passes import aot_private
from helixrt.passes.capture import capture
from helixrt.passes.errors import CaptureError
from helixrt.passes.nodes import origin
from helixrt.passes.parts import Part, Port, Role
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk

SEQ = 6
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) % 17


def model(family: str, tied: bool, chunk: int = 0, chunks: int = 1) -> nn.Module:
    config = ModelConfig(family=family, layers=max(2, chunks), dim=8, heads=2, kv_heads=1, ffn=12, vocab=17, tied=tied)
    return build_chunk(config, SEQ, chunk, chunks, dtype=torch.float64)


def drop_after_blocks(module: nn.Module) -> None:
    for block in module.layers.values():
        block.register_forward_hook(lambda m, args, out: F.dropout(out, 0.3, m.training))


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def names(part: Part, role: Role, of: str = "inputs") -> set[str]:
    return {port.name for port in getattr(part, of) if port.role is role}


@pytest.mark.parametrize(
    ("family", "tied", "dropout"), [("gpt", True, True), ("gpt", False, False), ("llama", True, False), ("llama", False, True)]
)
def test_our_models_give_eager_loss_and_gradients(
    family: str, tied: bool, dropout: bool, values_of: Any, gradients_equal: Any
) -> None:
    module = model(family, tied)
    if dropout:
        drop_after_blocks(module)
    part = capture(module, (TOKENS,), loss=cross_entropy, target=TOKENS.flip(1))
    outputs = part.run(values_of(module, {"0": TOKENS, "target": TOKENS.flip(1)}, loss=torch.ones((), dtype=torch.float64)))
    # drawing after the graph did, from the same state, must give the same masks
    torch.manual_seed(3)
    first = part.run(values_of(module, {"0": TOKENS, "target": TOKENS.flip(1)}, loss=torch.ones((), dtype=torch.float64)))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    loss = cross_entropy(module(TOKENS), TOKENS.flip(1))
    loss.backward()
    assert torch.equal(after, torch.get_rng_state())
    torch.testing.assert_close(first[Port(Role.OUTPUT, "loss")], loss.detach(), rtol=1e-12, atol=0)
    gradients_equal(first, module)
    assert torch.equal(outputs[Port(Role.OUTPUT, "loss")], first[Port(Role.OUTPUT, "loss")]) != dropout
    assert names(part, Role.GRADIENT, "outputs") == {name for name, _ in module.named_parameters()}


def test_a_chunk_in_the_middle_has_input_and_output_gradients(values_of: Any, gradients_equal: Any) -> None:
    module = model("gpt", False, chunk=1, chunks=3)
    x = torch.randn(2, SEQ, 8, dtype=torch.float64, requires_grad=True)
    part = capture(module, (x,))
    assert names(part, Role.OUTPUT, "outputs") == names(part, Role.TANGENT) == {"output"}
    gradient = torch.randn_like(x)
    outputs = part.run(values_of(module, {"0": x}, output=gradient))
    y = module(x)
    y.backward(gradient)
    torch.testing.assert_close(outputs[Port(Role.OUTPUT, "output")], y.detach())
    torch.testing.assert_close(outputs[Port(Role.INPUT_GRADIENT, "0")], x.grad)
    gradients_equal(outputs, module)


class Odd(nn.Module):
    """Tied, frozen and unused parameters, buffers that change, keyword, number and None arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.bn = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(
        self, x: torch.Tensor, extra: dict[str, torch.Tensor], mask: torch.Tensor | None = None, scale: int = 3
    ) -> torch.Tensor:
        h = self.embedding(x) * self.frozen * scale + extra["bias"]
        if mask is not None:
            h = h * mask
        return self.head(self.bn(h.transpose(1, 2)).transpose(1, 2))


def test_ports_of_an_odd_module(values_of: Any, gradients_equal: Any) -> None:
    module = Odd()
    x, bias = torch.randint(0, 11, (2, 5)), torch.randn(8)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = torch.get_rng_state()
    part = capture(module, (x, {"bias": bias}), {"mask": None, "scale": 3}, loss=cross_entropy, target=x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())
    assert names(part, Role.INPUT) == {"0", "1['bias']"}
    assert names(part, Role.PARAMETER) == {"embedding.weight", "frozen", "bn.weight", "bn.bias"}
    assert names(part, Role.GRADIENT, "outputs") == {"embedding.weight", "bn.weight", "bn.bias"}
    outputs = part.run(values_of(module, {"0": x, "1['bias']": bias, "target": x}))
    cross_entropy(module(x, {"bias": bias}), x).backward()
    gradients_equal(outputs, module, rtol=1e-5, atol=1e-6)
    for name, buffer in module.named_buffers():  # eager has changed them by now
        torch.testing.assert_close(outputs[Port(Role.BUFFER, name)], buffer)
    assert names(part, Role.BUFFER, "outputs") == set(before)


def test_training_and_autocast_are_those_of_the_capture(values_of: Any, gradients_equal: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).eval()
    x = torch.randn(3, 4)
    ones = torch.ones(3, 1)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (out - target).float().pow(2).mean()

    part = capture(module, (x,), loss=loss, target=ones)
    assert not any("dropout" in str(node.target) or "bernoulli" in str(node.target) for node in part.graph.nodes)
    with torch.autocast("cpu", torch.bfloat16):
        part = capture(module, (x,), loss=loss, target=ones)
        expected = loss(module(x), ones)
    expected.backward()
    outputs = part.run(values_of(module, {"0": x, "target": ones}))
    assert torch.equal(outputs[Port(Role.OUTPUT, "loss")], expected.detach())
    gradients_equal(outputs, module, rtol=0, atol=0)


def test_gradients_may_be_kept_and_added_to(values_of: Any) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
            self.c = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a + self.b + self.c * 1.0

    module = Sums()
    part = capture(module, (torch.randn(3),))
    outputs = part.run(values_of(module, {"0": torch.randn(3)}, output=torch.ones(3)))
    gradients = [outputs[Port(Role.GRADIENT, name)] for name in "abc"]
    for gradient in gradients:
        gradient += 1
    assert [g.tolist() for g in gradients] == [[2.0] * 3, [2.0] * 3, 4.0]


def test_outputs_that_are_views_of_one_another(values_of: Any, gradients_equal: Any) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.linear(x)
            return h[:1], h.t()

    module, x = Pair(), torch.randn(2, 4)
    part = capture(module, (x,))
    tangents = {"output[0]": torch.randn(1, 4), "output[1]": torch.randn(4, 2)}
    outputs = part.run(values_of(module, {"0": x}, **tangents))
    torch.autograd.backward(module(x), list(tangents.values()))
    gradients_equal(outputs, module, rtol=1e-5, atol=1e-6)


def test_nodes_know_their_module_and_code_reads_as_python() -> None:
    module = model("gpt", False)
    part = capture(module, (TOKENS,), loss=cross_entropy, target=TOKENS)
    where = {node.name: origin(node) for node in part.graph.nodes if node.op == "call_function"}
    assert where["layers_0_qkv_addmm"].module == "layers.0.qkv" and not where["layers_0_qkv_addmm"].backward
    assert where["layers_1_ffn_in_mm_grad"].module == "layers.1.ffn_in" and where["layers_1_ffn_in_mm_grad"].backward
    code = part.code()
    compile(code, "joint", "exec")
    assert 'layers_0_qkv_addmm: "f64[12, 24]"' in code and "gpt.py" in code
    assert part.stamps[-1].name == "capture"


# ------------------------------------------------------------------------------------------------ transformers


def tiny_transformers(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=SEQ, **small)
        return transformers.GPT2LMHeadModel(config)
    small |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).double()
    experts = None if name == "mixtral" else "batched_mm"
    config = transformers.MixtralConfig(num_local_experts=4, experts_implementation=experts, **small)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "mixtral-batched"])
def test_transformers_models_unmodified(
    name: str, values_of: Any, gradients_equal: Any, in_three: Any, bitwise_equal: Any
) -> None:
    from helixrt.passes.split import split

    module = tiny_transformers(name).train()
    labels = TOKENS.flip(1)
    part = capture(module, (), {"input_ids": TOKENS, "labels": TOKENS})  # one tensor here, two in what follows
    loss_dtype = part.graph.find_nodes(op="placeholder")[part.inputs.index(Port(Role.TANGENT, "loss"))].meta["val"].dtype
    values = values_of(module, {"input_ids": TOKENS, "labels": labels}, loss=torch.ones((), dtype=loss_dtype))
    torch.manual_seed(5)
    outputs = part.run(values)
    torch.manual_seed(5)
    bitwise_equal(part, in_three(split(part), values), outputs)
    torch.manual_seed(5)
    loss = module(input_ids=TOKENS, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(outputs[Port(Role.OUTPUT, "loss")], loss.detach(), rtol=1e-6, atol=0)
    gradients_equal(outputs, module, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------ what cannot be captured


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"test_capture.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


class Stubborn(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.calls = nn.Linear(3, 3), how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.how == "break":
            torch._dynamo.graph_break()
        elif self.how == "branch":
            if x.sum() > 0:
                x = x + 1
        elif self.how == "item":
            x = x * len(range(int(x[0, 0].item())))
        elif self.how == "print":
            print(x)
        elif self.how == "count":
            self.calls += 1
        return x.sum()


@pytest.mark.parametrize(
    ("how", "text", "remedy"),
    [
        ("break", "graph_break()", "remove the graph break"),
        ("branch", "if x.sum() > 0", "torch.where"),
        ("item", ".item()", "keep the value a tensor"),
        ("print", "print(x)", "print"),
    ],
)
def test_what_cannot_be_captured_names_the_line_and_the_remedy(how: str, text: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Stubborn(how), (torch.randn(2, 3),))
    assert caught.value.where.endswith(line_of(Stubborn.forward, text))
    assert remedy in caught.value.remedy and caught.value.reason


def test_state_outside_tensors_is_told() -> None:
    with pytest.warns(UserWarning, match="changes Python objects .'model'"):
        capture(Stubborn("count"), (torch.randn(2, 3),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Stubborn("none"), (torch.randn(2, 3),))


@pytest.mark.parametrize("structured", [True, False])
def test_a_reworded_warning_of_dynamo_hides_no_state(structured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side effects are read from Dynamo's list; a torch without it whose wording is not known is an error."""
    from torch._dynamo import output_graph

    def reworded(message: Any) -> None:
        warnings.warn(f"this torch says it otherwise ({len(str(message))})", stacklevel=2)

    monkeypatch.setattr(output_graph, "warnings", SimpleNamespace(warn=reworded))
    if not structured:
        monkeypatch.setattr(aot_private, "SIDE_EFFECTS", "no method of this torch")
        with pytest.raises(CaptureError, match=f"side effects.*torch {torch.__version__.split('+')[0]}"):
            capture(Stubborn("count"), (torch.randn(2, 3),))
        return
    with pytest.warns(UserWarning, match="changes Python objects .'model'") as raised:
        capture(Stubborn("count"), (torch.randn(2, 3),))
    assert len(raised) == 1


def test_inputs_that_change_and_nothing_to_train() -> None:
    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return super().forward(x).sum()

    with pytest.raises(CaptureError, match="changes its input '0' in place"):
        capture(InPlace(3, 3), (torch.randn(2, 3),))
    with pytest.raises(CaptureError, match="requires grad"):
        capture(nn.Linear(3, 3).requires_grad_(False), (torch.randn(2, 3),))
