"""What an evaluation of the user's may change in the registered models, put back behind it.

In: registered models, their buffers, and optimizers that average the weights. Out: contexts. An evaluation runs on one replica
alone: running statistics that it updates, or a model that it leaves in evaluation mode, would make this replica train otherwise
than the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from helixrt.engines.buffers import Buffers
from helixrt.engines.registered import Registered
from helixrt.engines.sharded import local


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


def averaging(registered: Registered) -> list[Any]:
    """Optimizers with methods `eval` and `train`, as schedule-free ones have them: they put averaged weights into the
    parameters, and those that are trained."""
    return [o for o in registered.optimizers.values() if all(callable(getattr(o, name, None)) for name in ("eval", "train"))]


@contextmanager
def averaged_weights(optimizers: Sequence[Any]) -> Iterator[None]:
    """The parameters of these optimizers are the averaged weights; behind it the same bits as before, which `train` alone does
    not give. Version counters grow."""
    parameters = [local(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    trained = [parameter.detach().clone() for parameter in parameters]
    for optimizer in optimizers:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in optimizers:
            optimizer.train()
        with torch.no_grad():
            for parameter, value in zip(parameters, trained, strict=True):
                parameter.copy_(value)


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
