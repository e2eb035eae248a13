"""Cuts a model into pipeline stages.

In: the model's configuration and which stage of how many. Out: a module with that stage's part; its
parameters have the names they have in the whole model, and values that depend on seed and name
alone, so that every cut of a model starts from the same weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from helixrt.errors import ConfigError
from helixrt.train.config import ModelConfig
from helixrt.train.models.gpt import GPT
from helixrt.train.models.llama import Llama, rotary_tables

FAMILIES: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
TIED_PARAMETER = "embedding.weight"  # on the first and on the last stage when `ModelConfig.tied`
RESIDUAL_OUTPUTS = ("attention_out.weight", "ffn_out.weight")
INIT_STD = 0.02


def split_layers(layers: int, stages: int) -> list[range]:
    """Layers per stage, as even as possible; earlier stages take what is left over.

    Raises ConfigError for more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ConfigError("mesh.pp", stages, f"must be between 1 and the number of layers (model.layers={layers})")
    each, over = divmod(layers, stages)
    starts = [stage * each + min(stage, over) for stage in range(stages + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for a model that cannot be built."""
    if config.family not in FAMILIES:
        raise ConfigError("model.family", config.family, f"must be one of {', '.join(sorted(FAMILIES))}")
    for key in ("layers", "dim", "heads", "kv_heads", "ffn", "vocab"):
        if getattr(config, key) < 1:
            raise ConfigError(f"model.{key}", getattr(config, key), "must be at least 1")
    if config.dim % config.heads:
        raise ConfigError("model.heads", config.heads, f"must divide model.dim={config.dim}")
    if config.family == "llama":
        if config.heads % config.kv_heads:
            raise ConfigError("model.kv_heads", config.kv_heads, f"must divide model.heads={config.heads}")
        if config.dim // config.heads % 2:
            raise ConfigError("model.heads", config.heads, f"model.dim={config.dim} per head must be even for rotary positions")


def build_stage(
    config: ModelConfig, seq_len: int, stage: int, stages: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The part of the model that `stage` of `stages` computes; (0, 1) is the whole model.

    Raises ConfigError for a model that cannot be built or more stages than layers.
    """
    check_model(config)
    layers = split_layers(config.layers, stages)[stage]
    with torch.device("meta"):
        module = FAMILIES[config.family](config, seq_len, layers, stage == 0, stage == stages - 1)
    module.to_empty(device="cpu").to(dtype)
    if isinstance(module, Llama):
        module.cos, module.sin = rotary_tables(seq_len, config.dim // config.heads, dtype)
    for name, parameter in module.named_parameters():
        initialize(name, parameter, config, seed)
    return module


@torch.no_grad()
def initialize(name: str, parameter: nn.Parameter, config: ModelConfig, seed: int) -> None:
    """Set one parameter: zeros for biases, ones for norms, else normal; residual outputs scaled by depth."""
    if name.endswith(".bias"):
        parameter.zero_()
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        std = INIT_STD / math.sqrt(2 * config.layers) if name.endswith(RESIDUAL_OUTPUTS) else INIT_STD
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
