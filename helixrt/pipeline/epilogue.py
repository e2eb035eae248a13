"""What the stages of a replica tell each other once a pass: what its batch is like, the loss, norms, gradients of tied copies.

All of it goes over the channels that activations take, with lanes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from helixrt.pipeline.channels import Channel, Lane, RecvHandle, Tag


def share_loss(
    channels: Mapping[int, Channel], stage: int, home: int, generation: int, step: int
) -> Callable[[float | None], float]:
    """Begin before a pass, so that no rank waits for the request of the loss; call the result after it.

    Stage `home`, which has the last chunk, puts its loss in (others None), every stage gets it back.
    """
    tag = Tag(generation, step, 0, 0, Lane.LOSS)
    expected = channels[home].recv(tag, torch.empty(1, dtype=torch.float64)) if stage != home else None

    def result(loss: float | None) -> float:
        if expected is not None:
            return float(expected.wait().item())
        assert loss is not None
        for channel in channels.values():
            channel.send(tag, torch.tensor([loss], dtype=torch.float64))
        return loss

    return result


def gather(
    channels: Mapping[int, Channel],
    stage: int,
    stages: int,
    generation: int,
    step: int,
    value: float,
    lane: Lane = Lane.NORM,
) -> list[float]:
    """Every stage's value, in the order of stages."""
    tag = Tag(generation, step, 0, 0, lane)
    mine = torch.tensor([value], dtype=torch.float64)
    handles: dict[int, RecvHandle] = {peer: channels[peer].recv(tag, mine) for peer in range(stages) if peer != stage}
    for peer in handles:
        channels[peer].send(tag, mine)
    return [handles[peer].wait().item() if peer in handles else value for peer in range(stages)]


def sum_tied(
    channels: Mapping[int, Channel], stages: Sequence[int], number: int, grad: torch.Tensor, generation: int, step: int
) -> Callable[[], None]:
    """Add the gradients of the other copies of a tied parameter to this one's.

    `stages` are those that have a copy, in the same order on all of them; `channels` lead to the others. `number` distinguishes
    the tied parameters of a model apart. Begin before a pass; call the result when `grad` is final here. All copies get the
    same bits: terms are added in the order of `stages`.
    """
    tag = Tag(generation, step, 0, number, Lane.TIED)
    expected = {peer: channels[peer].recv(tag, grad) for peer in stages if peer in channels}

    def result() -> None:
        sent = [channels[peer].send(tag, grad) for peer in expected]
        others = {peer: handle.wait() for peer, handle in expected.items()}
        for handle in sent:
            handle.wait()
        total, *terms = (others.get(stage, grad) for stage in stages)
        for term in terms:
            total.add_(term)
        if total is not grad:
            grad.copy_(total)

    return result
