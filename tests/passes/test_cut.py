"""Chunks of one captured model, run by their F, B and W graphs, train as eager PyTorch does, however many there are.

Every model is captured once, cut into several numbers of chunks, and run over three micro-batches in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helixrt.errors import ConfigError
from helixrt.passes import cut as cutting
from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.cut import CutModel, cut
from helixrt.passes.errors import CaptureError
from helixrt.passes.executable import Executable
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.seeding import SEED, mixed, order_of, seed_of
from helixrt.passes.split import split, whole_backward
from helixrt.passes.weave import alternating, weave
from helixrt.pipeline.graph_stage import ChunkGraphs
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk

MICROBATCHES, ROWS, SEQ, VOCAB, LAYERS = 3, 2, 6, 17, 4
EXACT = 1e-14

Values = dict[Port, torch.Tensor]
Trained = tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]  # losses, gradients, buffers
Calls = list[tuple[tuple[Any, ...], dict[str, torch.Tensor], Any]]  # args, kwargs and target of each micro-batch


# ------------------------------------------------------------------------------------------------ two ways to train


def draws(made: CutModel) -> dict[int, set[int]]:
    """By the number of each random operator, the chunks that run it."""
    found: dict[int, set[int]] = {}
    for chunk in made.chunks:
        for order in filter(lambda order: order is not None, map(order_of, chunk.part.graph.nodes)):
            found.setdefault(order, set()).add(chunk.number)
    return found


class Reseeding(TorchDispatchMode):
    """Every random operator draws after `torch.manual_seed` of the seed and its number."""

    def __init__(self, seed: torch.Tensor) -> None:
        super().__init__()
        self.seed, self.count = int(seed), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(mixed(self.seed, self.count))
            self.count += 1
        return func(*args, **(kwargs or {}))


def eager(model: nn.Module, calls: Calls, loss: Any = None) -> Trained:
    owners = [("", model), *([("loss.", loss)] if isinstance(loss, nn.Module) else [])]
    before = {prefix + n: b.clone() for prefix, o in owners for n, b in o.named_buffers()}
    losses = []
    for index, (args, kwargs, target) in enumerate(calls):
        with Reseeding(seed_of(index)):
            output = model(*args, **kwargs)
            result = loss(output, target) if loss is not None else output if isinstance(output, torch.Tensor) else output.loss
        (result / len(calls)).backward()
        losses.append(result.detach())
    gradients = {prefix + n: p.grad for prefix, o in owners for n, p in o.named_parameters() if p.grad is not None}
    buffers = {prefix + n: b.clone() for prefix, o in owners for n, b in o.named_buffers()}
    for prefix, owner in owners:
        owner.zero_grad()
        for name, buffer in owner.named_buffers():
            buffer.copy_(before[prefix + name])
    return losses, gradients, buffers


def lasting_of(model: nn.Module, loss: Any = None) -> Values:
    values: Values = {}
    for prefix, owner in (("", model), ("loss.", loss)):
        if isinstance(owner, nn.Module):
            values |= {Port(Role.PARAMETER, prefix + n): p.detach() for n, p in owner.named_parameters()}
            values |= {Port(Role.BUFFER, prefix + n): b.clone() for n, b in owner.named_buffers()}
    return values


def given_by(call: tuple[Any, dict[str, torch.Tensor], Any], index: int) -> Values:
    args, kwargs, target = call
    values = {Port(Role.INPUT, str(name)): value for name, value in (*enumerate(args), *kwargs.items())}
    if target is not None:
        values[Port(Role.TARGET, "target")] = target
    return values | {SEED: seed_of(index)}


def piecewise(model: CutModel, lasting: Values, calls: Calls) -> Trained:
    """The chunks' F, B and W, over all micro-batches; buffers in `lasting` change."""
    halves = [split(chunk.part) for chunk in model.chunks]
    losses, gradients = [], {}
    for index, call in enumerate(calls):
        given, x, held = given_by(call, index), None, []
        for chunk, parts in zip(model.chunks, halves, strict=True):
            values = {each.port: given[each.source] for each in chunk.inputs} | ({SEED: given[SEED]} if chunk.seeded else {})
            if chunk.before is not None:
                assert (tuple(x.shape), x.dtype) == (chunk.before.shape, chunk.before.dtype) and x.is_contiguous()
                values[Port(Role.INPUT, "0")] = x
            outputs = parts.forward.run(lasting | values)
            for port, value in outputs.items():
                if port.role is Role.BUFFER:
                    lasting[port] = value.clone()
            values |= {port: value for port, value in outputs.items() if port.role is Role.SAVED}
            (x,) = (value for port, value in outputs.items() if port.role is Role.OUTPUT)
            held.append(values)
        losses.append(x)
        tangent = torch.full_like(x, 1 / len(calls))
        for chunk, parts, values in reversed(list(zip(model.chunks, halves, held, strict=True))):
            values[Port(Role.TANGENT, "loss" if chunk.after is None else "output")] = tangent
            for part in (parts.backward, parts.weight):
                outputs = part.run(lasting | values)
                values |= {port: value for port, value in outputs.items() if port.role is Role.SAVED}
                for port, value in outputs.items():
                    if port.role is Role.GRADIENT:
                        gradients[port.name] = gradients[port.name] + value if port.name in gradients else value
                    elif port.role is Role.INPUT_GRADIENT:
                        tangent = value
                        assert tuple(value.shape) == chunk.before.shape and value.is_contiguous()
    return losses, gradients, {port.name: value for port, value in lasting.items() if port.role is Role.BUFFER}


def check_equal(found: Trained, expected: Trained) -> None:
    """Losses, gradients and buffers."""
    for one, other in zip(found[0], expected[0], strict=True):
        assert abs(float(one - other)) <= EXACT
    for ours, theirs in (found[1:2] + expected[1:2], found[2:] + expected[2:]):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert float((value - theirs[name]).abs().max()) <= EXACT, name


def check_cuts(model: nn.Module, joint: Part, calls: Calls, cuts: dict[int, Any], loss: Any = None) -> dict[int, CutModel]:
    """Each cut against eager; `cuts` are boundaries by number of chunks."""
    expected = eager(model, calls, loss)
    made = {}
    for chunks, boundaries in cuts.items():
        made[chunks] = cut(joint, boundaries)
        assert len(made[chunks].chunks) == chunks
        state = torch.get_rng_state()
        check_equal(piecewise(made[chunks], lasting_of(model, loss), calls), expected)
        assert torch.equal(torch.get_rng_state(), state)
    return made


# ------------------------------------------------------------------------------------------------ transformers


def tiny(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    small = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
    if name == "gpt2":
        drops = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
        config = transformers.GPT2Config(n_layer=LAYERS, n_embd=8, n_head=2, n_positions=SEQ, **drops, **small)
        return transformers.GPT2LMHeadModel(config).double().train()
    small |= {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "max_position_embeddings": SEQ}
    if name == "mixtral":
        moe = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5, "tie_word_embeddings": True}
        config = transformers.MixtralConfig(experts_implementation="batched_mm", **moe, **small)
        return transformers.MixtralForCausalLM(config).double().train()
    if name == "llama":
        config = transformers.LlamaConfig(tie_word_embeddings=False, attention_dropout=0.2, **small)
        return transformers.LlamaForCausalLM(config).double().train()
    if name == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(tie_word_embeddings=True, **small)).double().train()
    small.pop("num_key_value_heads")
    config = transformers.GPTNeoXConfig(hidden_dropout=0.1, attention_dropout=0.1, **small)
    return transformers.GPTNeoXForCausalLM(config).double().train()


def token_calls() -> Calls:
    generator = torch.Generator().manual_seed(1)
    calls: Calls = []
    for index in range(MICROBATCHES):
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, : index + 1] = 0  # left padding
        labels = tokens.masked_fill(mask == 0, -100)
        calls.append(((), {"input_ids": tokens, "attention_mask": mask, "labels": labels}, None))
    return calls


@pytest.mark.system
def test_gpt2_with_dropout_padding_and_a_tied_head() -> None:
    model, calls = tiny("gpt2"), token_calls()
    joint = capture(model, (), calls[0][1])
    names = [f"transformer.h.{layer}" for layer in range(LAYERS)]
    made = check_cuts(model, joint, calls, {1: (), 2: names[2:3], 4: names[1:], 6: range(1, 6)})
    (tie,) = made[4].ties
    assert (tie.name, tie.chunks) == ("transformer.wte.weight", (0, 3)) and not made[1].ties
    assert sorted(draws(made[4])) == list(range(1 + 3 * LAYERS))
    assert [chunk.layers for chunk in made[2].chunks] == [(0, 1), (2, 3)]
    assert [chunk.first for chunk in made[4].chunks] == ["", *names[1:]]
    hidden = (ROWS, SEQ, 8)
    assert [(b.shape, len(b.values), len(b.gradients)) for b in made[6].boundaries] == [(hidden, 1, 1)] * 5
    inputs = [{each.port.name for each in chunk.inputs} for chunk in made[4].chunks]
    assert inputs == [{"input_ids", "attention_mask"}, {"attention_mask"}, {"attention_mask"}, {"attention_mask", "labels"}]
    assert made[2].hash != made[4].hash and made[2].hash == cut(joint, (3,)).hash


@pytest.mark.slow
def test_mixtral_with_an_auxiliary_loss_of_all_layers() -> None:
    """The head needs the router logits of every layer: they cross beside the hidden state."""
    model, calls = tiny("mixtral"), token_calls()
    model(**calls[0][1])  # installs the hooks that collect router logits, see compile.transformers_private
    joint = capture(model, (), calls[0][1])
    made = check_cuts(model, joint, calls, {2: (3,), 4: (2, 3, 4)})
    assert [len(b.values) for b in made[4].boundaries] == [2, 3, 4] == [len(b.gradients) for b in made[4].boundaries]
    assert [len(b.shape) for b in made[4].boundaries] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox"])
def test_families(name: str) -> None:
    model, calls = tiny(name), token_calls()
    check_cuts(model, capture(model, (), calls[0][1]), calls, {2: (3,), 4: (2, 3, 4)})


# ------------------------------------------------------------------------------------------------ own models


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("family", "experts", "tied"),
    [("gpt", 0, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", 0, False), ("gpt", 4, False)))],
)
def test_our_models(family: str, experts: int, tied: bool) -> None:
    """Experts have an auxiliary loss, whose gradient each layer adds by itself."""
    sizes = {"layers": LAYERS, "dim": 8, "heads": 2, "kv_heads": 2, "ffn": 12, "vocab": VOCAB}
    config = ModelConfig(family=family, tied=tied, experts=experts, capacity=0.9, auxiliary=0.5, **sizes)
    model = build_chunk(config, SEQ, 0, 1, dtype=torch.float64, auxiliary_scale=0.5)
    tokens = torch.randint(0, VOCAB, (MICROBATCHES, 2, ROWS, SEQ))
    calls: Calls = [((x,), {}, target) for x, target in tokens]
    joint = capture(model, calls[0][0], loss=token_loss, target=calls[0][2])
    made = check_cuts(model, joint, calls, {2: ("layers.2",), 4: (2, 3, 4)}, token_loss)
    assert [chunk.gradients.count("embedding.weight") for chunk in made[4].chunks] == [1, 0, 0, int(tied)]


class Block(nn.Module):
    """A layer with a buffer that forward changes, dropout, and a mask made of the model's input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.linear(self.norm(x)), 0.3, self.training) * mask


class Tower(nn.Module):
    """Layers with a random mask that all share, drawn outside of them."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens > 2).double().unsqueeze(1)
        kept = torch.bernoulli(torch.full((ROWS * SEQ, 1), 0.5, dtype=torch.float64))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask + kept)
        return x


class Head(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, VOCAB)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x), target)


@pytest.fixture(scope="module")
def tower() -> tuple[nn.Module, nn.Module, Calls, Part]:
    torch.manual_seed(0)
    model, head = Tower().double().train(), Head().double()
    tokens = torch.randint(0, VOCAB, (MICROBATCHES, 2, ROWS * SEQ))
    calls: Calls = [((x,), {}, target) for x, target in tokens]
    return model, head, calls, capture(model, calls[0][0], loss=head, target=calls[0][2])


def test_buffers_losses_with_parameters_and_shared_random_masks(tower: Any) -> None:
    model, head, calls, joint = tower
    made = check_cuts(model, joint, calls, {1: (), 2: (3,), 4: (2, 3, 4)}, head)
    first, *others = made[4].chunks
    assert {each.port.name for each in first.inputs} == {"0"}
    assert all(Port(Role.INPUT, cutting.MODEL_0) in {each.port for each in chunk.inputs} for chunk in others[:-1])
    assert draws(made[4])[0] == {0, 1, 2, 3} and len(draws(made[4])) == 1 + LAYERS
    assert first.changed == tuple(f"blocks.0.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))
    assert {"loss.linear.weight", "loss.linear.bias"} <= set(others[-1].gradients)


def test_chunks_go_through_executables_and_weaving(tower: Any) -> None:
    """The forward of a chunk woven with the whole backward of another gives what both give alone."""
    model, head, calls, joint = tower
    chunks = cut(joint, (3,)).chunks
    forward = ChunkGraphs(chunks[0].part).halves.forward
    halves = split(chunks[1].part)
    backward = whole_backward(halves)
    lasting = lasting_of(model, head)
    values = lasting | given_by(calls[0], 0) | {Port(Role.INPUT, cutting.MODEL_0): calls[0][0][0]}
    alone = forward.run(values)
    values[Port(Role.INPUT, "0")] = alone[Port(Role.OUTPUT, "output")]
    values |= halves.forward.run(values) | {Port(Role.TANGENT, "loss"): torch.ones((), dtype=torch.float64)}
    expected = backward.run(values)
    woven = Executable(weave(forward, backward, alternating(forward, backward)))
    own = {Port(Role.INPUT, "0"): calls[0][0][0]}  # of the first chunk: the model's input
    given: dict[str, torch.Tensor] = {}

    class Gradients:
        def give(self, name: str, gradient: torch.Tensor) -> None:
            given[name] = gradient

    def take(port: Port) -> torch.Tensor:
        plain = Port(port.role, port.name)
        return own[plain] if port.strand == 0 and plain in own else values[plain]

    results = dict(woven(take, Gradients()))
    for port, value in expected.items():
        found = given[port.name] if port.role is Role.GRADIENT else results[Port(port.role, port.name, 1)]
        assert torch.equal(found, value), port
    assert torch.equal(results[Port(Role.OUTPUT, "output")], alone[Port(Role.OUTPUT, "output")])


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def test_layers_that_are_computed_again() -> None:
    model = Checkpointed().double().train()
    calls: Calls = [((torch.randn(4, 8, dtype=torch.float64),), {}, None) for _ in range(MICROBATCHES)]
    joint = capture(model, calls[0][0])
    whole = cut(joint)
    assert len(draws(whole)) == LAYERS
    expected = piecewise(whole, lasting_of(model), calls)
    for boundaries in ((3,), (2, 3, 4)):
        made = cut(joint, boundaries)
        check_equal(piecewise(made, lasting_of(model), calls), expected)
        for chunk in made.chunks:
            forward, backward = (chunk_part(chunk.part, back) for back in (False, True))
            assert forward.count("tanh") == len(chunk.layers) == backward.count("tanh")


class Residual(nn.Module):
    """A layer whose residual sum is in its region, where there is one."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def residuals(checkpointed: bool) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*(Residual(checkpointed) for _ in range(LAYERS)), nn.Linear(8, 8)).double()


def test_layers_with_their_residual_sum_are_computed_again_as_eager_does() -> None:
    model, loss = residuals(True), F.mse_loss
    calls: Calls = [((x,), {}, x.cos()) for x in torch.randn(MICROBATCHES, 4, 8, dtype=torch.float64)]
    joint = capture(model, calls[0][0], loss=loss, target=calls[0][2])
    made = check_cuts(model, joint, calls, {2: ("2",), 4: ("1", "2", "3")}, loss)
    assert all(len(boundary.gradients) == 1 for cut in made.values() for boundary in cut.boundaries)
    for part in (joint, *(chunk.part for chunk in made[4].chunks[:3])):
        layers = LAYERS if part is joint else 1
        assert chunk_part(part, True).count("addmm") == layers, "eager computes the first product of a layer again"
        assert chunk_part(part, True).count("native_layer_norm") == layers


@pytest.mark.system
def test_gpt2_with_gradient_checkpointing() -> None:
    model, calls = tiny("gpt2"), token_calls()
    expected = eager(model, calls)
    products = chunk_part(capture(model, (), calls[0][1]), False).count("addmm")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made = cut(capture(model, (), calls[0][1]), ("transformer.h.2",))
    assert [len(boundary.gradients) for boundary in made.boundaries] == [1]
    again = sum(chunk_part(chunk.part, True).count("addmm") for chunk in made.chunks)
    assert again == products, "a layer ends with dropout, whose mask is made again"
    check_equal(piecewise(made, lasting_of(model), calls), expected)


def chunk_part(part: Part, backward: bool) -> list[str]:
    """The names of the operators of a part's forward or backward."""
    found = (node for node in part.graph.nodes if nodes.origin(node).backward == backward)
    return [node.target._opname for node in found if isinstance(node.target, torch._ops.OpOverload)]


# ------------------------------------------------------------------------------------------------ what cannot be cut


class Strange(nn.Module):
    """Layers that are run in ways a pipeline cannot."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(x)
        order = (0, 1, 0, 2) if self.way == "shared" else (0, 1, 2)
        for layer in order:
            x = torch.tanh(self.layers[layer](x))
            if self.way == "two":
                x = x * first
            if self.way == "counts":
                self.seen += 1
                x = x * self.seen.clone()
        return x.sum()


REFUSED = {
    "shared": "layers.0 runs again after layers.1, as a layer that is used several times.* train this model with pp=1",
    "two": "besides the hidden state .*, layers of later chunks need",
    "counts": "the buffer 'seen', which forward changes, is used in chunks",
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_cut_is_named(way: str) -> None:
    joint = capture(Strange(way), (torch.randn(2, 8),))
    with pytest.raises(CaptureError, match=REFUSED[way]):
        cut(joint, (2, 3))


def test_boundaries_that_are_none(tower: Any) -> None:
    *_, joint = tower
    with pytest.raises(ConfigError, match="must be a layer, blocks.0 to blocks.3"):
        cut(joint, ["blocks.7"])
    with pytest.raises(ConfigError, match="in the order that the model runs them"):
        cut(joint, ["blocks.2", "blocks.1"])


def test_models_without_layers_or_loss() -> None:
    with pytest.raises(CaptureError, match="no list of layers"):
        cut(capture(nn.Linear(3, 3), (torch.randn(2, 3),), loss=F.mse_loss, target=torch.randn(2, 3)), (1,))
    with pytest.raises(CaptureError, match="a pipeline needs the loss alone"):
        cut(capture(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), (torch.randn(2, 3),)), (1,))


class Low(nn.Module):
    """A layer with an adapter, whose names have capitals."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.lora_A, self.lora_B = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + 2 * self.lora_B(self.lora_A(x)))


class Forwarding(nn.Module):
    """A model whose attributes a wrapper gives, as PEFT's do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_model(x)


def test_adapters_in_a_wrapper_are_cut() -> None:
    model = Forwarding(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), *(Low() for _ in range(3))))
    x, target = torch.randn(2, 4), torch.randn(2, 4)
    made = cut(capture(model, (x,), loss=F.mse_loss, target=target), ("base_model.2",))
    for chunk, numbers in zip(made.chunks, ((1,), (2, 3)), strict=True):
        whole = whole_backward(split(chunk.part))
        names = {f"base_model.{number}.lora_{which}.weight" for number in numbers for which in "AB"}
        assert {port.name for port in whole.outputs if port.role is Role.GRADIENT} == names


def test_a_frozen_beginning_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    model[0].requires_grad_(False)
    joint = capture(model, (torch.randn(2, 3),), loss=F.mse_loss, target=torch.randn(2, 3))
    with pytest.raises(CaptureError, match="the cut before 1: .* all parameters before it are frozen"):
        cut(joint, ["1"])
    assert len(cut(joint, ["2"]).chunks) == 2
