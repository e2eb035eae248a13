"""Whole models are captured without memory: the graph is that of the real model, and the model is as it was."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helixrt.compile.fake_model import capture_whole, fake_model
from helixrt.compile.whole_model import WholeModel
from helixrt.errors import ConfigError
from helixrt.passes.capture import capture
from helixrt.passes.chunk_times import ChunkTimes
from helixrt.passes.cut import cut
from helixrt.passes.errors import CaptureError
from helixrt.passes.parts import Part, Role
from helixrt.passes.unit_costs import balanced
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Schedule

SEQ, VOCAB = 6, 17
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) % VOCAB


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return self.head(x)


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def lines(part: Part) -> list[str]:
    return [f"{node.name} {node.target} {node.args}" for node in part.graph.nodes] + [
        str(p) for p in part.inputs + part.outputs
    ]


@pytest.fixture(scope="module")
def on_meta() -> tuple[nn.Module, Part]:
    with torch.device("meta"):
        model = Tied()
    model = model.double()
    before = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    joint = capture_whole(model, (TOKENS,), loss=token_loss, target=TOKENS)
    assert {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())} == before
    return model, joint


def test_the_graph_is_that_of_the_real_model(on_meta: tuple[nn.Module, Part]) -> None:
    _, joint = on_meta
    assert lines(joint) == lines(capture(Tied().double(), (TOKENS,), loss=token_loss, target=TOKENS))
    assert [port.name for port in joint.outputs if port.role is Role.GRADIENT].count("embed.weight") == 1


def test_cuts_are_balanced_by_estimates_by_measured_times_or_named(on_meta: tuple[nn.Module, Part]) -> None:
    _, joint = on_meta
    chosen = balanced(joint, (0, 1, 1, 0))
    chunks = cut(joint, chosen.starts).chunks
    assert len(chunks) == 4 and len(chosen.times) == 2
    assert "embed.weight" in chunks[0].parameters and "embed.weight" in chunks[3].parameters
    named = cut(joint, ["layers.1", "layers.2", "head"])
    assert [chunk.layers for chunk in named.chunks] == [(0,), (1,), (2, 3), ()]
    in_all = {"": 1.0, "head": 9.0} | {f"layers.{layer}": 3.0 for layer in range(4)}
    times = {name: ChunkTimes(each / 4, each / 4, each / 2, 3 * each / 4) for name, each in in_all.items()}
    found = balanced(joint, (0, 1), measured=times)
    assert found.times == (10.0, 12.0) and found.starts == (4,)
    with pytest.raises(ConfigError, match="has no time for 'layers.0'"):
        balanced(joint, (0, 1), measured={"": times[""]})
    with pytest.raises(ConfigError, match="layers.9: is no unit of the model"):
        balanced(joint, (0, 1), measured={"layers.9": times[""]})


def test_meta_parameters_are_refused_by_capture(on_meta: tuple[nn.Module, Part]) -> None:
    with pytest.raises(CaptureError, match="embed.weight is on the meta device"):
        capture(on_meta[0], (TOKENS,), loss=token_loss, target=TOKENS)


class Held(nn.Module):
    """Reads a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(3, 3), torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.table).sum()


def test_a_tensor_without_contents_is_refused() -> None:
    with torch.device("meta"):
        model = Held()
    with pytest.raises(CaptureError):
        capture_whole(model, (torch.randn(2, 3),))


def test_devices_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be the device that the graph runs on"):
        capture_whole(Tied(), (TOKENS,), loss=token_loss, target=TOKENS, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="is not here"):
            capture_whole(Tied(), (TOKENS,), loss=token_loss, target=TOKENS, device="cuda")


def test_a_broken_capture_leaves_the_model_as_it_was() -> None:
    model = Tied()
    weight = model.embed.weight
    with pytest.raises(RuntimeError, match="stop"), fake_model(model):
        assert model.embed.weight is not weight and model.embed.weight is model.head.weight
        raise RuntimeError("stop")
    assert model.embed.weight is weight and model.head.weight is weight


@pytest.mark.slow
def test_a_transformers_model_on_meta_with_caches_and_an_auxiliary_loss() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    small: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "max_position_embeddings": SEQ, "num_hidden_layers": 2, "num_local_experts": 4}
    small |= {"experts_implementation": "batched_mm", "output_router_logits": True}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small)).train()
    assert model.config.use_cache
    joint = capture_whole(model, (), {"input_ids": TOKENS, "labels": TOKENS})
    assert model.config.use_cache
    assert len(cut(joint, (2,)).boundaries[0].values) == 2  # the hidden state and the router's logits
    with pytest.raises(ConfigError, match="use_cache"):
        capture_whole(model, (), {"input_ids": TOKENS, "labels": TOKENS, "use_cache": True})


@pytest.mark.system
@pytest.mark.parametrize("policy", ["1f1b", "zb", "gpipe"])
def test_a_cut_keeps_each_stage_within_its_memory(policy: str) -> None:
    """A wide embedding, and layers that save much: without a limit the first stage of GPipe holds too much."""
    with torch.device("meta"):
        model = Tied().double()
    schedule = build(policy, 4, 8)
    call = ((torch.zeros(2, SEQ, dtype=torch.int64),), {}, torch.zeros(2, SEQ, dtype=torch.int64))
    joint = WholeModel(model, token_loss, call).joint()
    free = balanced(joint, schedule, in_flight=schedule.in_flight)
    most = max(free.bytes)

    def chunks_within(limit_bytes: float) -> list[tuple[int, ...]]:
        found = WholeModel(model, token_loss, call, limit_bytes=limit_bytes).cut(schedule)
        return [chunk.layers for chunk in found.chunks]

    assert chunks_within(most) == [chunk.layers for chunk in cut(joint, free.starts).chunks], "it fits"
    with pytest.raises(ConfigError, match="memory_gb=.*is too little for any cut of this model into 4 chunks on 4 stages"):
        chunks_within(0.1 * most)
    with pytest.raises(ConfigError, match="memory_gb=.*: needs several chunks to balance"):
        WholeModel(model, token_loss, call, limit_bytes=most).cut(build(policy, 1, 8))
    fitting = [share for share in (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5) if fits(joint, schedule, share * most)]
    for share in fitting:
        found = balanced(joint, schedule, limit_bytes=share * most, in_flight=schedule.in_flight)
        assert max(found.bytes) <= share * most and found.starts != free.starts
        assert chunks_within(share * most) == [chunk.layers for chunk in cut(joint, found.starts).chunks]
    assert fitting or policy != "gpipe", "the cut moves"


def fits(joint: Part, schedule: Schedule, limit_bytes: float) -> bool:
    try:
        balanced(joint, schedule, limit_bytes=limit_bytes, in_flight=schedule.in_flight)
    except ConfigError:
        return False
    return True


@pytest.mark.slow
def test_thirty_two_layers_of_width_4096_take_no_memory() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50_000)).to(torch.bfloat16).train()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tokens = torch.zeros(1, 512, dtype=torch.int64)
    joint = capture_whole(model, (), {"input_ids": tokens, "labels": tokens})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert size > 12e9 and grown < 0.2 * size
    found = cut(joint, balanced(joint, range(4)).starts)
    assert [chunk.before.shape for chunk in found.chunks[1:] if chunk.before] == [(1, 512, 4096)] * 3
