"""A model over four stages, from the model on meta to the end of the first step: no rank ever holds more than its stage.

Stages are threads; each counts the memory of the tensors that its own operators make. The capture is counted, too, in the
thread that does it (`cut_once`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import helixrt
from helixrt.bench._live_storage import LiveStorage
from helixrt.job.mesh import Mesh
from tests.job.session_world import session_with
from tests.job.test_captured import MICROBATCHES, StageHost, cut_once  # noqa: F401

STAGES, LENGTH, VOCABULARY, WIDTH, LAYERS = 4, 4, 96, 64, 4
WORKING = 0.75  # of a stage: activations of all micro-batches in flight, and the gradient that is being made
REST = 0.1  # of a stage: buffers and other small things


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Held:
    """Bytes of a stage's own parameters and of the largest; peaks until the stage was made, until it was trained, in all."""

    own: int
    largest: int
    made: int
    trained: int
    peak: int


def stepped(number: int, group: Any) -> Held:
    """One stage, up to the end of the first step."""
    tokens = torch.arange(MICROBATCHES * LENGTH).view(MICROBATCHES, LENGTH) % VOCABULARY
    named = {"input_ids": tokens, "labels": tokens}
    with LiveStorage([tokens]) as live:
        session = session_with(StageHost(number, STAGES, group), seed=5, mesh=Mesh(pp=STAGES))
        compiled = helixrt.compile(llama(), microbatches=MICROBATCHES)
        part = session.parallelize(compiled, example=helixrt.ExampleBatch(**named))
        made = live.peak_bytes
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1, foreach=False)
        session.register(model=part, optimizers=[optimizer])
        for step in session.steps([((), named, None)], until=1):
            for _, batch, _ in step:
                step.train(part, **batch)
            trained = live.peak_bytes
            assert step.commit().committed
        sizes = [parameter.nbytes for parameter in part.parameters()]
        return Held(sum(sizes), max(sizes), made, trained, live.peak_bytes)


@pytest.mark.system
def test_no_rank_ever_holds_more_than_its_stage(run_stages: Any) -> None:
    whole = sum(parameter.nbytes for parameter in llama().parameters())
    stages = run_stages(STAGES, stepped, timeout_s=240.0)
    assert sum(held.own for held in stages) == whole
    for held in stages:
        assert held.own < whole / 3  # a set of tensors of the whole model would exceed each bound
        assert held.own <= held.made <= (1 + REST) * held.own + 2 * held.largest  # one tensor at a time is made and checked
        assert 2 * held.own <= held.trained <= (2 + WORKING) * held.own  # with gradients
        assert held.peak <= (3 + REST) * held.own  # with the sums that the test's worker hands back
