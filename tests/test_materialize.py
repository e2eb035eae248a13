"""Making real what a stage needs of a model: by the model's own rule, from files, never more than the stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.bench._live_storage import LiveStorage
from helixrt.compile.materialize import materialize, places
from helixrt.errors import ConfigError
from helixrt.passes.pieces import Piece, piece_of


def gpt2(layers: int = 4) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 40, "n_positions": 8, "n_embd": 16, "n_layer": layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0)).double()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=1, max_position_embeddings=8))


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()


def stages_of(model: nn.Module, count: int) -> list[list[str]]:
    """Names by layer, what comes before and after them on the first and the last stage; the tied head on both."""
    found: list[list[str]] = [[] for _ in range(count)]
    for name in places(model):
        layer = next((int(piece) for piece in name.split(".") if piece.isdecimal()), None)
        if layer is not None:
            found[layer * count // 4].append(name)
        else:
            found[0 if "embed" in name or "wte" in name or "wpe" in name else -1].append(name)
            if "rotary" in name:
                found[0].append(name)
    return found


@pytest.mark.parametrize("build", [gpt2, llama])
def test_the_weights_are_the_same_for_every_number_of_stages(build: Any) -> None:
    whole = materialize(on_meta(build), list(places(on_meta(build))), seed=3)
    assert {name for name in whole.parameters} | whole.persistent == set(build().state_dict())
    for count in (2, 4):
        seen: set[str] = set()
        for names in stages_of(on_meta(build), count):
            part = materialize(on_meta(build), names, seed=3)
            for kind in ("parameters", "buffers"):
                for name, tensor in getattr(part, kind).items():
                    assert torch.equal(tensor, getattr(whole, kind)[name]), name
                    seen.add(name)
        assert seen == {*whole.parameters, *whole.buffers}
    other = materialize(on_meta(build), list(places(on_meta(build))), seed=4)
    assert any(not torch.equal(other.parameters[name], tensor) for name, tensor in whole.parameters.items())


def test_the_rule_is_that_of_the_model() -> None:
    """GPT-2 scales the projections that add to the residual stream, in a module above them."""
    torch.manual_seed(3)
    made, usual = materialize(on_meta(gpt2), list(places(on_meta(gpt2)))).parameters, gpt2().state_dict()
    for name, tensor in usual.items():
        same, spread = torch.equal(made[name], tensor), tensor.std().item()
        assert same if spread == 0 else made[name].std().item() == pytest.approx(spread, rel=0.3), name
    assert made["lm_head.weight"] is made["transformer.wte.weight"]


def test_buffers_that_are_not_stored_are_made_again() -> None:
    made, usual = materialize(on_meta(llama), list(places(on_meta(llama)))).buffers, dict(llama().named_buffers())
    assert made and made.keys() == usual.keys() and all(torch.equal(made[name], usual[name]) for name in made)


def test_no_more_than_the_stage_is_ever_allocated() -> None:
    model = on_meta(gpt2)
    names = stages_of(model, 4)[1]
    wanted = sum(places(model)[name].tensor.nbytes for name in names)
    with LiveStorage([]) as live:
        part = materialize(model, names)
    assert {name for name, tensor in model.named_parameters() if not tensor.is_meta} == set(part.parameters)
    largest = max(tensor.nbytes for tensor in part.parameters.values())
    on_meta_too = sum(place.tensor.nbytes for place in places(model).values())
    assert wanted <= live.peak_bytes <= wanted + 2 * largest < on_meta_too / 2  # the checks look at one tensor at a time


def test_weights_are_read_by_name(tmp_path: Path) -> None:
    model = gpt2()
    for folder, size in (("one", "5GB"), ("several", "10KB")):
        model.save_pretrained(tmp_path / folder, max_shard_size=size)  # type: ignore[operator]
        names = stages_of(on_meta(gpt2), 2)[1]
        part = materialize(on_meta(gpt2), names, weights=tmp_path / folder)
        assert part.parameters and all(torch.equal(each, model.state_dict()[name]) for name, each in part.parameters.items())
    with pytest.raises(ConfigError, match=r"does not hold transformer\.h\.4"):
        materialize(on_meta(lambda: gpt2(5)), ["transformer.h.4.ln_1.weight"], weights=tmp_path / "one")
    with pytest.raises(ConfigError, match="must be a safetensors file"):
        materialize(on_meta(gpt2), names, weights=tmp_path / "none")


def pieces_for(model: nn.Module, rank: int, ranks: int = 3) -> dict[str, Piece]:
    """Of every matrix; those that two matrices are packed into have a part of each."""
    tensors = {name: place.tensor for name, place in places(model).items() if place.is_parameter and place.tensor.dim() == 2}
    blocks = {name: 2 if "c_fc" in name or "gate_proj" in name else 1 for name in tensors}
    return {name: piece_of(b - 1, tensors[name].shape[b - 1], rank, ranks, b) for name, b in blocks.items()}


@pytest.mark.parametrize("build", [gpt2, llama])
def test_parts_are_those_of_the_whole_weights(build: Any, tmp_path: Path) -> None:
    names = list(places(on_meta(build)))
    whole, real = materialize(on_meta(build), names, seed=3), build()
    real.save_pretrained(tmp_path)
    for rank in range(3):
        pieces = pieces_for(on_meta(build), rank)
        parts = materialize(on_meta(build), names, seed=3, pieces=pieces)
        read = materialize(on_meta(build), names, seed=3, pieces=pieces, weights=tmp_path)
        taken = materialize(copy.deepcopy(real), names, pieces=pieces)
        for name, tensor in whole.parameters.items():
            first = next(each for each in whole.parameters if whole.parameters[each] is tensor)
            cut = pieces[first].of if first in pieces else lambda each: each
            assert torch.equal(parts.parameters[name], cut(tensor)), name
            for found in (read, taken):
                assert torch.equal(found.parameters[name], cut(real.state_dict()[name])), name
    tied = {id(each) for each in parts.parameters.values()}
    assert len(tied) == len({id(each) for each in whole.parameters.values()})


def test_pieces_are_cut_as_dtensor_cuts() -> None:
    whole = torch.arange(2 * 10).view(2, 10)
    for ranks in (2, 3, 4):
        found = [piece_of(1, 10, rank, ranks).of(whole) for rank in range(ranks)]
        chunks = [*whole.chunk(ranks, 1), *[whole[:, :0]] * ranks][:ranks]
        assert all(map(torch.equal, found, chunks))
    assert piece_of(1, 10, 0, 4, blocks=2).of(whole)[0].tolist() == [0, 1, 5, 6]
    assert piece_of(1, 10, 2, 4, blocks=2).of(whole)[0].tolist() == [4, 9]
    assert torch.equal(piece_of(1, 10, 2, 4, blocks=2).read(whole), piece_of(1, 10, 2, 4, blocks=2).of(whole))


def test_a_rank_with_parts_never_has_more_whole_than_a_layer() -> None:
    model = on_meta(lambda: gpt2(8))
    names = [name for name in places(model) if ".h." in name]
    layer = sum(places(model)[name].tensor.nbytes for name in names if ".h.0." in name)
    pieces = {name: piece_of(0, places(model)[name].tensor.shape[0], 0, 4) for name in names}
    with LiveStorage([]) as live:
        part = materialize(model, names, pieces=pieces)
    own = sum(tensor.nbytes for tensor in part.parameters.values())
    assert own <= 8 * layer / 4 + 1024
    assert own <= live.peak_bytes <= own + 2 * layer < 8 * layer


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.arange(4))


def test_what_has_no_rule_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model=0\.index: is on the meta device, and no rule gives it values"):
        materialize(on_meta(lambda: nn.Sequential(Table(), nn.Linear(2, 2))), ["0.index", "1.weight"])
