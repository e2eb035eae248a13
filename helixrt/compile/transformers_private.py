"""The one file that knows what `transformers` does to its models outside of tensors.

In: a module that may have models of `transformers` in it. Out: for the time of a block, the module as capture needs it:
without key-value caches, and with the hooks that record outputs of layers (router logits of experts, for the auxiliary
loss), which are otherwise installed in the first forward, where Dynamo cannot trace it. And what of a model's attention can be
replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def for_training(model: nn.Module) -> Iterator[None]:
    """`use_cache` is False in all configurations inside of the block."""
    install_hooks(model)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def install_hooks(model: nn.Module) -> None:
    """As the first forward would. Older versions of transformers (before 5) have no such hooks."""
    if "transformers" not in sys.modules:  # no model of it without it
        return
    try:
        from transformers.utils import output_capturing
    except ImportError:
        return
    recorded: Any = output_capturing._CAN_RECORD_REGISTRY
    install: Callable[[Any], None] = output_capturing.maybe_install_capturing_hooks
    for module in model.modules():  # models before those inside of them, which are then done
        if hasattr(module, "config") and recorded.get(module):
            install(module)


def has_attention_interface(model: Any) -> bool:
    """Whether the attention of a model of transformers can be replaced (`AttentionInterface`)."""
    return bool(model._can_set_attn_implementation())


def is_stateful(model: Any) -> bool:
    """Whether a model of transformers has layers with a state that goes along the sequence, such as Mamba's."""
    return bool(getattr(model, "_is_stateful", False))
