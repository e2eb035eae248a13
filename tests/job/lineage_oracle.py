"""What a run with several replicas must end with: one process that follows its lineage, in plain PyTorch.

In: a run's folder, and per step the batches of its contributors. Out: the model after the last record. Nothing of the engine,
the exchange or the session is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from helixrt.job.lineage_files import read_lineage
from helixrt.protocol.collective.algorithms.choice import all_reduce
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.step.lineage import CommitRecord, Log
from tests.protocol.run_plans import run_plans

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, float]]  # the sum of a micro-batch's losses, and over how many items


def chain(folder: Path) -> list[CommitRecord]:
    return Log(read_lineage(folder / "lineage")).chain()


def follow(
    records: list[CommitRecord],
    model: nn.Module,
    batch_at: Callable[[int, int], Any],
    seed_at: Callable[[int, int], None],
    loss: Loss,
    update: Callable[[], None],
    accumulate: int = 1,
    add: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
) -> None:
    """`batch_at(replica, position)`, `seed_at(replica, position)`; `update()` with gradients in `p.grad`. Running buffers are
    averaged over the contributors. `add` sums the contributors' gradients, each all parameters' in one flat tensor
    (None: one after the other)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for before, record in zip(records, records[1:], strict=False):
        if not record.applied:
            continue
        gradients: list[torch.Tensor] = []
        present: set[int] = set()
        committed = {name: b.clone() for name, b in model.named_buffers()}
        after: list[dict[str, torch.Tensor]] = []
        total = 0.0
        for replica in record.summed:
            model.zero_grad(set_to_none=True)
            for name, buffer in model.named_buffers():
                buffer.copy_(committed[name])
            first = before.positions[replica]
            for position in range(first, first + accumulate):
                batch = batch_at(replica, position)
                seed_at(replica, position)
                value, weight = loss(model, batch)
                value.backward()
                total += weight
            present |= {index for index, parameter in enumerate(trained) if parameter.grad is not None}
            mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            gradients.append(torch.cat([gradient.reshape(-1) for gradient in mine]))
            after.append({name: b.clone() for name, b in model.named_buffers()})
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                changed = [values[name] for values in after]
                if buffer.is_floating_point():
                    buffer.copy_((sum(c.double() for c in changed) / len(changed)).to(buffer.dtype))  # type: ignore[union-attr]
                else:
                    buffer.copy_(torch.stack(changed).amax(0))
        total_gradient = reduce(torch.add, gradients) if add is None else add(gradients)
        parts = total_gradient.split([parameter.numel() for parameter in trained])
        for index, (parameter, part) in enumerate(zip(trained, parts, strict=True)):
            parameter.grad = (part / total).view(parameter.shape) if index in present else None
        update()


def ftar_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of flat float32 tensors, one of each replica, in the order in which FTAR's all-reduce adds them."""
    if len(parts) == 1:
        return parts[0].clone()
    length = 4 * parts[0].numel()
    plans = [all_reduce(rank, len(parts), length, 4, Tuning()) for rank in range(len(parts))]
    sources = [part.tolist() for part in parts]
    memories = run_plans(plans, sources, [length] * len(parts), window_bytes=1 << 30, code="f")
    return torch.tensor(memories[0].numbers())


def parameters_digest(model: nn.Module) -> str:
    """As a replica of one rank reports it: names, shapes and bytes, of tied parameters once."""
    return digest_of_ranks([dict(model.named_parameters())])


def digest_of_ranks(ranks: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """Of a replica whose ranks hold these parameters."""
    found = []
    for held in ranks:
        lines = sorted((f"parameter/{name}", tuple(tensor.shape), sum_of(tensor)) for name, tensor in held.items())
        text = "\n".join(f"{name} {shape} {number}" for name, shape, number in lines)
        found.append(hashlib.sha256(text.encode()).hexdigest()[:32])
    return hashlib.sha256("".join(found).encode()).hexdigest()


def sum_of(tensor: torch.Tensor) -> int:
    """Of 64-bit words, each times an odd weight; pieces of 131,072 words are joined by a factor. As a signed number."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    factor, most = 0x5851F42D4C957F2D, 1 << 17
    words = np.frombuffer(raw[: len(raw) // 8 * 8], dtype=np.uint64)
    weights = (2 * np.arange(most, dtype=np.uint64) + np.uint64(1)) * np.uint64(factor)
    found = sum(byte * int(weights[at]) for at, byte in enumerate(raw[len(raw) // 8 * 8 :]))
    for first in range(0, len(words), most):
        piece = words[first : first + most]
        found = found * factor + int((piece * weights[: len(piece)]).sum(dtype=np.uint64))
    found %= 1 << 64
    return found - (1 << 64) if found >> 63 else found


def reported(folder: Path) -> list[str]:
    """The hash of the final parameters of each replica, by its report."""
    return [r["parameters_digest"] for r in json.loads((folder / "report.json").read_text())["replicas"]]
