"""Cuts a model into the chunks of a pipeline.

In: the model's configuration and which chunk of how many. Out: a module with that part; its parameters
have the names they have in the whole model, and values that depend on seed and name alone, so that
every cut of a model starts from the same weights, bit for bit. The parts of tensor- and expert-parallel ranks, put
together (`parallel.join`), are those weights too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import nn

from helixrt.errors import ConfigError
from helixrt.parallel import CONTEXTS
from helixrt.train.config import ModelConfig
from helixrt.train.models.gpt import GPT
from helixrt.train.models.llama import Llama, rotary_tables
from helixrt.train.models.moe import CHOICES
from helixrt.train.models.parallel import ALONE, Layout, ParallelGroups, check_groups, full_shape, layouts, own_part

FAMILIES: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
TIED_PARAMETER = "embedding.weight"  # in the first and in the last chunk when `ModelConfig.tied`
RESIDUAL_OUTPUTS = ("attention_out.weight", "ffn_out.weight")
INIT_STD = 0.02


def split_layers(layers: int, chunks: int) -> list[range]:
    """Layers per chunk, as even as possible; earlier chunks take what is left over.

    Raises ConfigError for more chunks than layers.
    """
    if not 1 <= chunks <= layers:
        raise ConfigError("model.layers", layers, f"must be at least one per chunk of the model, {chunks}")
    each, over = divmod(layers, chunks)
    starts = [chunk * each + min(chunk, over) for chunk in range(chunks + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for a model that cannot be built."""
    if config.family not in FAMILIES:
        raise ConfigError("model.family", config.family, f"must be one of {', '.join(sorted(FAMILIES))}")
    for key in ("layers", "dim", "heads", "kv_heads", "ffn", "vocab"):
        if getattr(config, key) < 1:
            raise ConfigError(f"model.{key}", getattr(config, key), "must be at least 1")
    if config.experts and config.experts < CHOICES:
        raise ConfigError("model.experts", config.experts, f"must be at least {CHOICES}, or 0 for none")
    if config.experts and config.moe_every < 1:
        raise ConfigError("model.moe_every", config.moe_every, "must be at least 1")
    if config.experts and not config.capacity >= 0:
        raise ConfigError("model.capacity", config.capacity, "must be above 0, or 0 for no limit")
    if config.context not in CONTEXTS:
        raise ConfigError("model.context", config.context, f"must be one of {', '.join(CONTEXTS)}")
    if config.dim % config.heads:
        raise ConfigError("model.heads", config.heads, f"must divide model.dim={config.dim}")
    if config.family == "llama":
        if config.heads % config.kv_heads:
            raise ConfigError("model.kv_heads", config.kv_heads, f"must divide model.heads={config.heads}")
        if config.dim // config.heads % 2:
            raise ConfigError("model.heads", config.heads, f"model.dim={config.dim} per head must be even for rotary positions")


def build_chunks(
    config: ModelConfig,
    seq_len: int,
    placement: Sequence[int],
    stage: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    groups: ParallelGroups = ALONE,
    auxiliary_scale: float = 1.0,
) -> dict[int, nn.Module]:
    """The chunks that a placement (`placement[chunk]` is its stage) has on `stage`, by number; see `build_chunk`.

    If the first and the last chunk are on one stage, a tied weight is one parameter of both.
    """
    chunks = len(placement)
    mine = {
        chunk: build_chunk(
            config, seq_len, chunk, chunks, seed=seed, dtype=dtype, groups=groups, auxiliary_scale=auxiliary_scale
        )
        for chunk, home in enumerate(placement)
        if home == stage
    }
    if config.tied and chunks > 1 and placement[0] == placement[-1] == stage:
        mine[chunks - 1].embedding = mine[0].embedding
    return mine


def build_chunk(
    config: ModelConfig,
    seq_len: int,
    chunk: int,
    chunks: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    groups: ParallelGroups = ALONE,
    auxiliary_scale: float = 1.0,
) -> nn.Module:
    """Part `chunk` of the model cut into `chunks`; (0, 1) is the whole model.

    `groups` are the ranks that share each layer; `seq_len` is that of whole sequences. `auxiliary_scale` multiplies
    the auxiliary loss of experts: 1 / micro-batches where gradients are of the mean over micro-batches.

    Raises ConfigError for a model that cannot be built or shared by these groups, or more chunks than layers.
    """
    check_model(config)
    check_groups(config, seq_len, groups)
    layers = split_layers(config.layers, chunks)[chunk]
    with torch.device("meta"):
        module = FAMILIES[config.family](config, seq_len, layers, chunk == 0, chunk == chunks - 1, groups, auxiliary_scale)
    module.to_empty(device="cpu").to(dtype)
    if isinstance(module, Llama):
        module.cos, module.sin = rotary_tables(seq_len, config.dim // config.heads, dtype)
    known = layouts(module)
    for name, parameter in module.named_parameters():
        initialize(name, parameter, config, seed, known[name], groups)
    return module


@torch.no_grad()
def initialize(
    name: str, parameter: nn.Parameter, config: ModelConfig, seed: int, layout: Layout, groups: ParallelGroups
) -> None:
    """Set one parameter: zeros for biases, ones for norms, else normal; residual outputs scaled by depth."""
    if name.endswith(".bias"):
        parameter.zero_()
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        std = INIT_STD / math.sqrt(2 * config.layers) if name.endswith(RESIDUAL_OUTPUTS) else INIT_STD
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        full = torch.empty(full_shape(parameter.shape, layout, groups), dtype=torch.float32)
        parameter.copy_(own_part(full.normal_(0.0, std, generator=generator), layout, groups))
