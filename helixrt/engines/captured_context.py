"""A captured transformers model over cp ranks: attention over the whole sequence, and each rank's part of a batch.

In: a model of transformers, on the meta device or real, and the cp ranks of its stage. Out: the model with an attention
function of transformers' public interface (`AttentionInterface`) that communicates (`helixrt.parallel.attention`); of each
batch the positions of this rank, and their `position_ids`. All else in a decoder works on each position alone.

What would give other gradients than one rank is refused: before the capture, within it (the attention function sees the masks,
dropout and other arguments of a layer), or by the captured graph.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from helixrt.compile.options import Options
from helixrt.compile.transformers_private import has_attention_interface, is_stateful
from helixrt.errors import ConfigError
from helixrt.parallel.attention import causal_attention, context_part
from helixrt.parallel.group import Group
from helixrt.passes.cut_model import CutModel
from helixrt.passes.nodes import origin
from helixrt.passes.parts import Role

IGNORED = -100  # the target of a position without a loss, as torch and transformers have it
_TOKENS = ("input_ids", "inputs_embeds")
_POSITIONS = "position_ids"
_PLAIN = (  # arguments of a layer that change nothing in its attention
    "cache_position", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits", _POSITIONS,
    "position_embeddings", "return_dict", "use_cache",
)  # fmt: skip
_CAUSAL = ("full_attention", "attention")  # of a configuration's layer_types
_OF_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the length of the sequence
_LOSS_RULE = (
    "with mesh.cp above 1 a model's own loss is wrong, since it shifts labels within each rank's positions: give "
    "helixrt.compile(loss=...), and the next tokens of the whole sequence as target="
)
_REMEDY = "train it with mesh.cp=1, or write its parts for helixrt.Stages"


class ContextCut:
    """The cp ranks of one stage, and the model that they share. Raises ConfigError (mesh.cp) for a model that they cannot."""

    def __init__(self, model: nn.Module, cp: Group, options: Options) -> None:
        self._cp, self._context, self._what = cp, options.context, type(model).__name__
        if options.chunk_dims is not None:
            raise ConfigError("chunk_dims", options.chunk_dims, "cannot be with mesh.cp above 1: a batch is [rows, positions]")
        if options.loss is None:
            raise ConfigError("loss", None, _LOSS_RULE)
        if reason := _refusal(model):
            raise self._refused(reason)
        self._signature = inspect.signature(model.forward)

    def apply(self, model: nn.Module) -> None:
        """Give the model (a copy of the user's, with a configuration of its own) the attention over the cp ranks."""
        from transformers import AttentionInterface, AttentionMaskInterface

        name = f"helixrt_context_{self._context}_{self._cp.name}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, no_mask)
        model.set_attn_implementation(name)  # type: ignore[operator]
        config: Any = model.config
        self._layers: int = config.num_hidden_layers

    def check(self, cut: CutModel) -> None:
        """Raises ConfigError if the captured model does anything with the sequence besides this attention, as far as seen."""
        nodes = [node for chunk in cut.chunks for node in chunk.part.graph.nodes if not origin(node).backward]
        name = "all_gather_into_tensor" if self._context == "gathered" else "helixrt_ring_shift"
        transfers = [node for node in nodes if name in str(node.target) and node.args[-1] == self._cp.name]
        each = 1 if self._context == "gathered" else self._cp.size - 1
        if len(transfers) < each * self._layers:
            raise self._refused(f"not each of its {self._layers} layers has the attention of transformers' interface")
        if not any(each.role is Role.INPUT and each.name == _POSITIONS for c in cut.chunks for each in c.part.inputs):
            raise self._refused(f"its forward does not use {_POSITIONS}")
        if changed := [name for chunk in cut.chunks for name in chunk.changed]:
            raise self._refused(f"its forward changes the buffer {changed[0]}, by the positions of one rank alone")

    def part_of(self, inputs: tuple[Any, ...], named: Mapping[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
        """This rank's positions of a batch, with their `position_ids`; and of its target.

        Raises ConfigError, with the argument's name, for what cannot be split along the sequence.
        """
        given = self._bound(inputs, named)
        tensors = {key: value for key, value in given.items() if pytree.tree_any(lambda x: isinstance(x, torch.Tensor), value)}
        if "labels" in tensors:
            raise ConfigError("labels", "a tensor", _LOSS_RULE)
        tokens = next((key for key in _TOKENS if key in tensors), None)
        if tokens is None or given[tokens].dim() < 2:
            rule = "with mesh.cp above 1 a batch has input_ids or inputs_embeds, of [rows, positions]"
            raise ConfigError("input_ids", None, rule)
        if others := [key for key in tensors if key != tokens]:
            what = "are made by the session" if others[0] == _POSITIONS else "cannot be split over the cp ranks"
            raise ConfigError(others[0], "a tensor", f"with mesh.cp above 1 a batch has {tokens} alone: {others[0]} {what}")
        rows, length = given[tokens].shape[:2]
        if length % (2 * self._cp.size):
            rule = f"positions must be a multiple of {2 * self._cp.size}: two pieces for each of {self._cp.size} cp ranks"
            raise ConfigError(tokens, f"{length} positions", rule)
        positions = context_part(torch.arange(length, device=given[tokens].device)[None], 1, self._cp)
        given |= {tokens: context_part(given[tokens], 1, self._cp), _POSITIONS: positions.repeat(rows, 1)}
        return given, pytree.tree_map_only(torch.Tensor, lambda each: self._of_target(each, length), target)

    def _bound(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of a call of the model by name."""
        try:
            bound = self._signature.bind_partial(*inputs, **named).arguments
        except TypeError as error:
            raise ConfigError("inputs", f"{len(inputs)} by position", f"are no arguments of {self._what}: {error}") from error
        kinds = self._signature.parameters
        further = next((name for name in bound if kinds[name].kind is inspect.Parameter.VAR_KEYWORD), "")
        return {name: value for name, value in bound.items() if name != further} | bound.get(further, {})

    def _of_target(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != length:
            rule = f"must be [rows, {length}, ...] with mesh.cp above 1: one for each position"
            raise ConfigError("target", list(tensor.shape), rule)
        return context_part(tensor, 1, self._cp)

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it: query [batch, heads, positions, head_dim]. Returns [batch, positions, heads, head_dim]."""
        if attention_mask is not None:
            raise ValueError("a mask of the model's own cannot be with mesh.cp above 1: attention is causal over all positions")
        if dropout:
            raise ValueError(f"attention dropout of {dropout} cannot be with mesh.cp above 1: set it to 0 in the configuration")
        if others.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise ValueError("attention that is not causal cannot be with mesh.cp above 1")
        for name, given in others.items():
            if name not in _PLAIN and given is not None and given is not False:
                raise ValueError(f"attention with {name} cannot be with mesh.cp above 1")
        if value.shape[-1] != query.shape[-1]:
            raise ValueError("values of another width than keys cannot be with mesh.cp above 1")
        root = query.shape[-1] ** 0.5  # attention divides by it
        if scaling is not None and not math.isclose(scaling * root, 1.0):
            query = query * (scaling * root)
        return causal_attention(query, key, value, self._cp, self._context).transpose(1, 2), None

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError("mesh.cp", self._cp.size, f"{self._what} cannot be shared by cp ranks: {reason}; {_REMEDY}")


def no_mask(attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **others: Any) -> None:
    """The mask of a causal attention, which knows it. Raises ValueError for other masks."""
    if attention_mask is not None:
        raise ValueError("attention_mask cannot be with mesh.cp above 1: all rows are of one length, without padding")
    if others.get("local_size") is not None:
        raise ValueError(
            "a sliding window or chunked attention cannot be with mesh.cp above 1: set config.sliding_window=None if sequences "
            "are no longer than it"
        )
    if use_vmap or "allow_is_bidirectional_skip" in others:
        raise ValueError("masks that are not causal cannot be with mesh.cp above 1")


def _refusal(model: nn.Module) -> str:
    """Why a model cannot be shared by cp ranks, as far as it is known before the capture; else ""."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return "it is no model of transformers"
    if not isinstance(model, PreTrainedModel):
        return "it is no model of transformers"
    config: Any = model.config
    if not has_attention_interface(model):
        return "its attention is not that of transformers' interface (AttentionInterface)"
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return "it is no decoder of text alone"
    if is_stateful(model) or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "it has layers that go along the sequence besides attention"
    if others := [kind for kind in getattr(config, "layer_types", None) or () if kind not in _CAUSAL]:
        return f"it has layers of type {others[0]}; set config.layer_types if sequences are no longer than a window"
    rotary = getattr(config, "rope_parameters", None) or {}
    if isinstance(rotary, Mapping) and rotary.get("rope_type") in _OF_LENGTH:
        return f"its rotary embedding ({rotary['rope_type']}) depends on the length of the sequence"
    if getattr(config, "output_router_logits", False):
        return "its auxiliary loss is no mean over tokens (set config.output_router_logits=False)"
    if _POSITIONS not in inspect.signature(model.forward).parameters:
        return f"its forward takes no {_POSITIONS}"
    return ""


def has_ignored(target: Any) -> bool:
    """Whether positions of the target have no loss, so that a mean over each rank's positions is not that over all."""
    tensors = [each for each in pytree.tree_leaves(target) if isinstance(each, torch.Tensor) and not each.is_floating_point()]
    return any(bool((each == IGNORED).any()) for each in tensors)
