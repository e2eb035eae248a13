"""Models: a cut model is the whole one, weights do not depend on the cut, wrong sizes are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helixrt.errors import ConfigError
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import TIED_PARAMETER, build_chunk, split_layers
from helixrt.train.models.llama import rotary_tables, rotate

SEQ = 12
SMALL = ModelConfig(layers=5, dim=16, heads=4, kv_heads=2, ffn=24, vocab=32)
CONFIGS = [replace(SMALL, family=family, tied=tied) for family in ("gpt", "llama") for tied in (False, True)]


def tokens() -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (3, SEQ), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.family}-{c.tied}")
def test_any_cut_has_the_whole_models_weights_and_output(config: ModelConfig) -> None:
    whole = build_chunk(config, SEQ, 0, 1, seed=7)
    expected = whole(tokens())
    assert expected.shape == (3, SEQ, config.vocab)
    for stages in range(2, config.layers + 1):
        parts = [build_chunk(config, SEQ, stage, stages, seed=7) for stage in range(stages)]
        union: dict[str, torch.Tensor] = {}
        for stage, part in enumerate(parts):
            for name, value in part.state_dict().items():
                assert name not in union or (config.tied and name == TIED_PARAMETER and stage == stages - 1)
                assert name not in union or torch.equal(union[name], value)
                union[name] = value
        assert union.keys() == whole.state_dict().keys()
        assert all(torch.equal(union[name], value) for name, value in whole.state_dict().items())
        x = tokens()
        for part in parts:
            x = part(x)
        assert torch.equal(x, expected)


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (build_chunk(SMALL, SEQ, 0, 1, seed=s).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    double = build_chunk(SMALL, SEQ, 0, 1, seed=1, dtype=torch.float64).state_dict()
    assert all(torch.equal(one[n].double(), double[n]) for n in one)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_token_never_sees_later_ones(family: str) -> None:
    model = build_chunk(replace(SMALL, family=family), SEQ, 0, 1)
    changed = tokens()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab
    before, after = model(tokens()), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 0


def test_llama_block_against_a_plain_one() -> None:
    """Grouped-query attention, rotary positions and SwiGLU, head by head as the papers write them."""
    config = replace(SMALL, family="llama", layers=1)
    model = build_chunk(config, SEQ, 0, 1, dtype=torch.float64)
    block = model.layers["0"]
    x = torch.randn(2, SEQ, config.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def norm(v: torch.Tensor) -> torch.Tensor:
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    size = config.dim // config.heads
    turn = torch.polar(torch.ones(SEQ, size // 2, dtype=torch.float64), torch.atan2(model.sin, model.cos)[:, : size // 2])

    def rotated(v: torch.Tensor) -> torch.Tensor:
        z = torch.complex(v[..., : size // 2], v[..., size // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    heads = (norm(x) @ block.qkv.weight.T).split(size, dim=-1)
    mixed = []
    for head in range(config.heads):
        shared = config.heads + head // (config.heads // config.kv_heads)
        q, k, v = rotated(heads[head]), rotated(heads[shared]), heads[shared + config.kv_heads]
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(-1) @ v)
    h = x + torch.cat(mixed, -1) @ block.attention_out.weight.T
    gate, up = (norm(h) @ block.ffn_gate_up.weight.T).split(config.ffn, dim=-1)
    expected = h + (gate * gate.sigmoid() * up) @ block.ffn_out.weight.T
    torch.testing.assert_close(block(x, model.cos, model.sin), expected, rtol=1e-12, atol=1e-13)


def test_rotary_scores_depend_on_distance_alone() -> None:
    cos, sin = rotary_tables(SEQ, 8, torch.float64)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).expand(2, SEQ, 8)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).T
    for distance in range(SEQ):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_layers_are_split_evenly() -> None:
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            parts = split_layers(layers, stages)
            assert [i for part in parts for i in part] == list(range(layers))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ConfigError, match=r"model.layers=4: must be at least one per chunk of the model, 5"):
        split_layers(4, 5)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"family": "rnn"}, "model.family=rnn: must be one of gpt, llama"),
        ({"heads": 3}, "model.heads=3: must divide model.dim=16"),
        ({"family": "llama", "kv_heads": 3}, "model.kv_heads=3: must divide model.heads=4"),
        ({"family": "llama", "heads": 16, "kv_heads": 2}, "model.heads=16: model.dim=16 per head must be even"),
        ({"vocab": 0}, "model.vocab=0: must be at least 1"),
    ],
)
def test_wrong_sizes_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chunk(replace(SMALL, **change), SEQ, 0, 1)


def test_configured_sizes() -> None:
    yaml = pytest.importorskip("yaml", reason="sizes are YAML; needs the package pyyaml (comes with hydra)")
    folder = Path(__file__).parents[2] / "conf" / "model"
    counts: dict[str, int] = {}
    for path in sorted(folder.glob("*.yaml")):
        config = ModelConfig(**yaml.safe_load(path.read_text()))
        counts[path.stem] = sum(p.numel() for p in build_chunk(config, 128, 0, 1).parameters())
        assert config.layers >= (1 if path.stem == "gpt-nano" else 4), "enough for two stages of two chunks"
    assert counts["gpt-nano"] < 100_000
    assert 1_650_000 < counts["moe-tiny"] < 1_800_000
    assert 900_000 < counts["gpt-tiny"] < 1_100_000 and 900_000 < counts["llama-tiny"] < 1_100_000
