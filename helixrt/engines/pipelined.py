"""What a session gives for a model over pipeline stages: this rank's part of it, as a module.

Its parameters are those of this stage; an optimizer takes them, `Session.register` makes the engine. It is not called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from helixrt.engines.buffers import Mode
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.pipeline_parts import Batches
from helixrt.engines.registered import Registered
from helixrt.engines.update import Policy
from helixrt.errors import MisuseError


class PipelinedModel(nn.Module):
    """`train_batch` and `evaluate` are called by all stages of a replica, with the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: PipelineEngine | None = None

    @property
    def engine_in_use(self) -> PipelineEngine | None:
        """The one that `engine` made."""
        return self._engine

    @abstractmethod
    def engine(
        self,
        registered: Registered,
        *,
        policy: Policy | None = None,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        batches: Batches | None = None,
        buffers: Mode = "mean",
    ) -> PipelineEngine:
        """What trains this rank's part; see `PipelineParts`. Called by all ranks of the replica together, once."""

    @abstractmethod
    def train_batch(
        self, inputs: tuple[Any, ...], named: Mapping[str, Any], target: Any, weight: float | torch.Tensor | None = None
    ) -> float:
        """Forward and backward of a batch in a step; its mean loss. With `weight` the loss is a sum over so many items. Raises
        MisuseError for a batch that does not fit."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise MisuseError(
            "a model in stages is not called: in a step use step.train(model, x, target=y), in an evaluation "
            "model.evaluate(x, target=y)"
        )
