"""What an evaluation of the user's may change in the registered models, put back behind it.

In: registered models and their buffers. Out: a context. An evaluation runs on one replica alone: running statistics that it
updates, or a model that it leaves in evaluation mode, would make this replica train otherwise than the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from helixrt.engines.buffers import Buffers
from helixrt.engines.registered import Registered


@contextmanager
def evaluating(registered: Registered, buffers: Buffers) -> Iterator[None]:
    """Behind it every module's training mode, and every buffer that a forward may change, is what it was."""
    own = [(buffer, copy.deepcopy(buffer.state_dict())) for buffer in buffers.per_replica.values()]
    with _kept_modes(registered.models.values()):
        try:
            yield
        finally:
            buffers.discard()
            for buffer, state in own:
                buffer.load_state_dict(state)


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All of these in evaluation mode; behind it every module's mode is what it was."""
    modules = list(modules)
    with _kept_modes(modules):
        for module in modules:
            module.eval()
        yield


@contextmanager
def _kept_modes(models: Iterable[nn.Module]) -> Iterator[None]:
    every = (module for model in models for module in (*model.modules(), *getattr(model, "captured_modules", ())))
    modes = [(module, module.training) for module in every]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
