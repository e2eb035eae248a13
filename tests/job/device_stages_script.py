"""`python device_stages_script.py FOLDER CASE DEVICE DTYPE`: one replica of two stages trains a small model on a device.

Each stage leaves `stageN.pt` in FOLDER: its parameters by name, the losses and norms of the steps, and the times of its
operations. CASE: `parts` (own modules, autograd), `graphs` (the same by captured graphs), `gpt2` (an unmodified model)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import helixrt
from helixrt.record import Kind

STEPS, BATCH, MICROBATCHES, WIDTH, LENGTH, VOCABULARY = 6, 8, 4, 32, 12, 61


def layers() -> list[nn.Module]:
    generator = torch.Generator().manual_seed(3)
    made = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in made:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return [nn.Sequential(layer, nn.Tanh()) for layer in made]


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def batches(case: str) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    if case == "gpt2":
        return [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]
    return [(x, x.flip(1)) for x in (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(STEPS))]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain(case: str) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Parameters, losses and norms of a plain loop on the CPU."""
    model = gpt2() if case == "gpt2" else nn.Sequential(*layers())
    optimizer, losses, norms = optimizer_of(model), [], []
    for batch in batches(case):
        optimizer.zero_grad()
        if case == "gpt2":
            found = [model(input_ids=part, labels=part).loss for part in batch.chunk(MICROBATCHES)]
        else:
            found = [mse_loss(model(x), y) for x, y in zip(*(part.chunk(MICROBATCHES) for part in batch), strict=True)]
        (sum(found) / MICROBATCHES).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(sum(loss.item() for loss in found) / MICROBATCHES)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses, norms


def train(session: helixrt.Session, folder: str, case: str, dtype: str) -> None:
    if case == "gpt2":
        compiled = helixrt.compile(gpt2(), microbatches=MICROBATCHES)
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        model = session.parallelize(compiled, example=helixrt.ExampleBatch(input_ids=tokens, labels=tokens))
    else:
        whole, example = layers(), torch.zeros(BATCH // MICROBATCHES, WIDTH)
        graphs = "always" if case == "graphs" else "never"
        parts = [nn.Sequential(*whole[:2]), nn.Sequential(*whole[2:])]
        boundary = example.to(getattr(torch, dtype))
        model = session.parallelize(
            helixrt.Stages(parts, mse_loss, (example, example), boundary, microbatches=MICROBATCHES, graphs=graphs)
        )
    assert {parameter.device for parameter in model.parameters()} == {session.device}
    session.register(model=model, optimizers=[optimizer_of(model)], clip_norm=1.0)
    first = batches(case)[0]

    def measure() -> dict[str, float]:
        if case == "gpt2":
            return {"loss": model.evaluate(input_ids=first, labels=first)}  # type: ignore[operator]
        return {"loss": model.evaluate(first[0], target=first[1])}  # type: ignore[operator]

    session.evaluate(measure, every=3)
    losses, norms = [], []
    for step in session.steps(batches(case), until=STEPS):
        for batch in step:
            if case == "gpt2":
                losses.append(step.train(model, input_ids=batch, labels=batch))
            else:
                losses.append(step.train(model, batch[0], target=batch[1]))
        done = step.commit()
        norms.append(float(done.grad_norm))
        session.log({"loss": done.loss})
    stage = model.place.stage  # type: ignore[union-attr]
    events = [event for event in model.place.record.events() if event.kind is Kind.OPERATION]  # type: ignore[union-attr]
    spans = [(event.begin_s, event.end_s) for event in events]
    values = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    found = {"parameters": values, "losses": losses, "norms": norms, "spans": spans}
    torch.save(found, Path(folder) / f"stage{stage}.pt")


if __name__ == "__main__":
    FOLDER, CASE, DEVICE, DTYPE = sys.argv[1:5]
    given = {"folder": FOLDER, "case": CASE, "dtype": DTYPE}
    mesh = helixrt.Mesh(pp=2)
    result = helixrt.run(
        train, mesh=mesh, storage=FOLDER, seed=4, device=DEVICE, dtype=DTYPE, launcher="local", arguments=given
    )
    print(f"ended at step {result.step}")
