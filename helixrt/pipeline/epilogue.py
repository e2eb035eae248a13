"""What the stages of a replica tell each other once a pass: what its batch is like, the loss, norms, gradients of tied copies.

All of it goes over the channels that activations take, with lanes of its own. What every stage tells every other one takes the
quickest way: over channels that can wait for messages together (`SelectableChannel`) a few stages also tell all that they know,
so a slow link between two stages holds up none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from helixrt.pipeline.channels import CPU, Channel, Lane, RecvHandle, SelectableChannel, Tag

_RELAYS = 4  # stages that tell what they know, at most: of three at least one is at no end of a given link


def share_loss(
    channels: Mapping[int, Channel], stage: int, home: int, generation: int, step: int
) -> Callable[[float | None], float]:
    """Begin before a pass, so that no rank waits for the request of the loss; call the result after it.

    Stage `home`, which has the last chunk, puts its loss in (others None), every stage gets it back.
    """
    tag, passed_on = Tag(generation, step, 0, 0, Lane.LOSS), Tag(generation, step, 0, 1, Lane.LOSS)
    like, relays = torch.empty(1, dtype=torch.float64, device=CPU), [relay for relay in _relays(channels) if relay != home]
    expected: list[RecvHandle] = []
    if stage != home:
        expected = [channels[home].recv(tag, like), *(channels[r].recv(passed_on, like) for r in relays if r != stage)]

    def result(loss: float | None) -> float:
        if stage == home:
            assert loss is not None
            found = torch.tensor([loss], dtype=torch.float64, device=CPU)
            for channel in channels.values():
                channel.send(tag, found)
            return loss
        found = expected[_first(channels, [[handle] for handle in expected])].wait()
        if stage in relays:
            for peer, channel in channels.items():
                if peer != home:
                    channel.send(passed_on, found)
        return float(found.item())

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
    tag, table_tag = Tag(generation, step, 0, 0, lane), Tag(generation, step, 0, 1, lane)
    mine = torch.tensor([value], dtype=torch.float64, device=CPU)
    table = torch.empty(stages, dtype=torch.float64, device=CPU)
    peers = [peer for peer in range(stages) if peer != stage]
    handles: dict[int, RecvHandle] = {peer: channels[peer].recv(tag, mine) for peer in peers}
    relays = _relays(channels)
    tables = [channels[relay].recv(table_tag, table) for relay in relays if relay != stage]
    for peer in peers:
        channels[peer].send(tag, mine)
    first = _first(channels, [list(handles.values()), *([each] for each in tables)])
    if first == 0:
        told = [handles[peer].wait().item() if peer in handles else value for peer in range(stages)]
        table = torch.tensor(told, dtype=torch.float64, device=CPU)
    else:
        table = tables[first - 1].wait()
    if stage in relays:
        for peer in peers:
            channels[peer].send(table_tag, table)
    return [float(each) for each in table.tolist()]


def _relays(channels: Mapping[int, Channel]) -> tuple[int, ...]:
    """None where these channels cannot wait for messages together."""
    together = all(isinstance(channel, SelectableChannel) for channel in channels.values())
    return relays_of(len(channels) + 1) if together else ()


def _first(channels: Mapping[int, Channel], groups: Sequence[Sequence[RecvHandle]]) -> int:
    """The number of the group that is there first; the only one, if there are no others."""
    channel = next(iter(channels.values()), None)
    return channel.first(groups) if len(groups) > 1 and isinstance(channel, SelectableChannel) else 0


def relays_of(stages: int) -> tuple[int, ...]:
    """The stages that tell what they know: evenly spread over all."""
    count = min(stages, _RELAYS)
    return tuple(number * (stages - 1) // (count - 1) for number in range(count)) if count > 2 else ()


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
