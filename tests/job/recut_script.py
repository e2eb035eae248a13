"""`python recut_script.py FOLDER PP CP TP STEPS [RESUME]`: an unmodified GPT-2 in float64, captured and cut over the mesh."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import helixrt

BATCH, LENGTH, VOCABULARY, MICROBATCHES, CLIP = 4, 8, 11, 2, 0.5


def build() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    calm = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    small = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 4, "n_head": 2}
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**small, **calm, bos_token_id=0, eos_token_id=0)).double()


def batches() -> list[torch.Tensor]:
    """Tokens, with the one that follows the last one."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(10)]


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def train(session: helixrt.Session, steps: int) -> None:
    compiled = helixrt.compile(build(), loss=loss_of, microbatches=MICROBATCHES)
    text = batches()[0]
    example = helixrt.ExampleBatch(input_ids=text[:, :-1], target=text[:, 1:])
    model = session.parallelize(compiled, example=example)
    session.register(model=model, optimizers=[optimizer_of(model)], clip_norm=CLIP)
    for step in session.steps(batches(), until=steps):
        for tokens in step:
            step.train(model, input_ids=tokens[:, :-1], target=tokens[:, 1:])
        session.log({"loss": step.commit().loss})


def main(folder: str, pp: str, cp: str, tp: str, steps: str, resume: str | None = None) -> None:
    helixrt.run(
        train,
        replicas=1,
        mesh=helixrt.Mesh(pp=int(pp), cp=int(cp), tp=int(tp)),
        storage=Path(folder),
        device="cpu",
        launcher="local",
        resume=resume,
        arguments={"steps": int(steps)},
        options=helixrt.RunOptions(checkpoint_every=5, step_timeout_s=300.0),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
