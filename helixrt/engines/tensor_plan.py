"""Tensor-parallel plans: which module of a model is cut over the tp ranks, and how.

In: a model, a one-dimensional device mesh, and a plan: {pattern: style}, where a pattern is the name of a module or of a
parameter in which `*` stands for any one part between dots, and a style is a name of `tensor_styles` or a
`torch.distributed.tensor.parallel.ParallelStyle`. Without a plan the model's own one is taken: `model.tp_plan`, which Hugging
Face models have (their `config.base_model_tp_plan`, and entries for the head and the embedding), else one of `PLANS`. Out: the
model with the plan applied.

Entries of a user's plan must match; a model's own plan may name what this model has not. Modules that no entry names stay whole
on every rank, which computes the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from helixrt.engines.sharded import is_sharded
from helixrt.engines.tensor_styles import COLWISE, TERMS, apply_style, cut_parameter
from helixrt.errors import ConfigError, MisuseError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

TensorPlan = Mapping[str, "str | ParallelStyle"]
PLANS: Mapping[str, Mapping[str, str]] = {  # of transformers' base models that bring none, by `config.model_type`
    "gpt2": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "colwise_gather_output",  # queries, keys and values in one matrix
        "h.*.attn.c_proj": "rowwise_split_input",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
}
HEAD = {"lm_head": "colwise_gather_output"}  # above these
Place = tuple[nn.Module, str]  # a module and the key of one of its own parameters


@dataclass(frozen=True)
class _Entry:
    """One entry of a plan for one module (`key` is "") or for one of its parameters."""

    name: str
    module: nn.Module
    key: str
    style: str | ParallelStyle


def apply_plan(
    model: nn.Module, mesh: DeviceMesh, plan: TensorPlan | None = None, *, without_values: bool = False
) -> list[Place]:
    """Cut the model over the ranks of the mesh. Returns the parameters that every rank holds whole and of whose gradient each
    rank computes one term, by the plan. Ties between parameters are kept. A model without a plan whose parameters the user has
    cut over this mesh stays as it is. `without_values`: the model is on the meta device, and stays there.

    Raises MisuseError for a model without a plan, values or cut parameters, an entry that matches nothing or does not fit, and
    tied parameters that are cut differently; ConfigError for numbers of heads that the number of ranks does not divide.
    """
    from torch.distributed.fsdp import FSDPModule

    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty and not without_values:
        raise MisuseError(f"{empty[0]} is on the meta device; build the model with values before session.parallelize")
    cut_by_user = any(is_sharded(parameter) for parameter in model.parameters())
    if plan is None and cut_by_user:
        return []
    if cut_by_user or any(isinstance(module, FSDPModule) for module in model.modules()):
        raise MisuseError(
            "a tensor-parallel plan comes before fully_shard and any other plan; give session.parallelize the plain model"
        )
    entries = _entries(model, plan) if plan is not None else _own_entries(model, mesh)
    ties = list(_ties(model))
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    for entry in sorted(entries, key=lambda entry: not entry.key):  # parameters before the modules that use them
        _apply(entry, mesh)
    for tie in ties:
        _tie_again(tie)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)  # not all styles of torch keep it
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        raise MisuseError(
            "the plan cuts no parameter of the model; with Mesh(tp=...) give session.parallelize(model, tp_plan={...})"
        )
    return [place for entry in entries if entry.style == TERMS for place in _places(entry)]


# ---------------------------------------------------------------- reading a plan


def _own_entries(model: nn.Module, mesh: DeviceMesh) -> list[_Entry]:
    """Of the model's own plan, the entries that name something."""
    plan = _own_plan(model)
    entries = _entries(model, plan, must_match=False)
    if not entries:
        raise MisuseError(
            f"{type(model).__name__} has no tensor-parallel plan of its own; give one: session.parallelize(model, tp_plan={{"
            "'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'})"
        )
    _check_heads(model, entries, mesh.size())
    return entries


def _own_plan(model: nn.Module) -> Mapping[str, Any]:
    plan = getattr(model, "tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        return plan
    config = getattr(model, "config", None)
    plan, above = getattr(config, "base_model_tp_plan", None), {}
    if not isinstance(plan, Mapping) or not plan:
        plan = PLANS.get(getattr(config, "model_type", ""), {})
        above = HEAD if plan else {}
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {inside + pattern: style for pattern, style in plan.items()} | above


def _entries(model: nn.Module, plan: Mapping[str, Any], must_match: bool = True) -> list[_Entry]:
    """The entry for each module and parameter that one matches; if two match, the later one counts."""
    from torch.distributed.tensor.parallel import ParallelStyle

    modules = dict(model.named_modules())
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, _Entry] = {}
    for pattern, style in plan.items():
        if not isinstance(style, str | ParallelStyle):
            raise MisuseError(f"the plan has {style!r} for {pattern}; a style is a name or a ParallelStyle of torch")
        names = [name for name in modules if name and matches(name, pattern)]
        for name in names:
            found[name] = _Entry(name, modules[name], "", style)
        if not names:
            names = [name for name in parameters if matches(name, pattern)]
            for name in names:
                if not isinstance(style, str):
                    raise MisuseError(f"the plan has {style!r} for the parameter {name}; give it for its module")
                above, _, key = name.rpartition(".")
                found[name] = _Entry(name, modules[above], key, style)
        if must_match and not names:
            raise MisuseError(f"the plan's entry {pattern!r} matches no module and no parameter of {type(model).__name__}")
    return list(found.values())


def matches(name: str, pattern: str) -> bool:
    """Whether each part of the name between dots matches that of the pattern."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_heads(model: nn.Module, entries: list[_Entry], ranks: int) -> None:
    """Of a Hugging Face model whose attention is cut: each rank has whole heads."""
    config: Any = getattr(model, "config", None)
    if config is None or not any(
        entry.style == COLWISE and "attention" in entry.name.replace("attn", "attention") for entry in entries
    ):
        return
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError("mesh.tp", ranks, f"must divide {field}={heads} of {type(model).__name__}")


# ---------------------------------------------------------------- applying it


def _apply(entry: _Entry, mesh: DeviceMesh) -> None:
    if not isinstance(entry.style, str):
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(entry.module, mesh, entry.style)
    elif entry.key:
        cut_parameter(entry.style, entry.module, entry.key, entry.name, mesh)
    else:
        apply_style(entry.style, entry.module, entry.name, mesh)


def _places(entry: _Entry) -> Iterator[Place]:
    keys = [entry.key] if entry.key else [key for key, parameter in entry.module._parameters.items() if parameter is not None]
    for key in keys:
        yield entry.module, key


def _ties(model: nn.Module) -> Iterator[list[tuple[str, Place]]]:
    """The places of each parameter that stands in several."""
    places: dict[int, list[tuple[str, Place]]] = {}
    for above, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((f"{above}.{key}" if above else key, (module, key)))
    yield from (tied for tied in places.values() if len(tied) > 1)


def _tie_again(tied: list[tuple[str, Place]]) -> None:
    """One parameter for all places, if the plan has cut them in the same way; else MisuseError."""
    (first_name, (module, key)), *others = tied
    first: Any = module._parameters[key]
    for name, (other_module, other_key) in others:
        other: Any = other_module._parameters[other_key]
        same = other is first or (is_sharded(first) and is_sharded(other) and first.placements == other.placements)
        if not same:
            raise MisuseError(
                f"{first_name} and {name} are one parameter, and the plan cuts them differently; give both one style, such as "
                f"tp_plan={{..., {first_name.rpartition('.')[0]!r}: 'embedding_rowwise', {name.rpartition('.')[0]!r}: "
                "'colwise_gather_output'}"
            )
        other_module._parameters[other_key] = first
