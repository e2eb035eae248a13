"""Values that a part can be run on: indices index, masks leave all in, graphs share memory by shape."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helixrt.passes.capture import capture
from helixrt.passes.example_values import Pool
from helixrt.passes.parts import Part, Port, Role

ROWS, WORDS, CLASSES = 400, 7, 3


class Looking(nn.Module):
    """Integers that index through a view and a sum, some that count, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("offset", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = self.words((tokens + self.offset).view(-1))
        return self.head(seen * counts.view(-1, 1)).masked_fill(~mask.view(-1, 1), 0.0)


def looking() -> Part:
    tokens = torch.zeros(2, ROWS // 2, dtype=torch.int64)
    call = (tokens, tokens.int(), tokens.bool())
    return capture(Looking(), call, loss=cross_entropy, target=tokens.view(-1))


def test_integers_are_what_operators_can_take() -> None:
    part = looking()
    values = Pool().values(part)
    tokens, counts, mask = (values[Port(Role.INPUT, str(at))] for at in range(3))
    assert set(tokens.unique().tolist()) == set(range(WORDS))  # all of them, and no other
    assert set(values[Port(Role.TARGET, "target")].unique().tolist()) == set(range(CLASSES))
    assert counts.eq(1).all() and mask.all()
    values |= {Port(Role.TANGENT, port.name): torch.ones(()) for port in part.inputs if port.role is Role.TANGENT}
    assert values.keys() == set(part.inputs)


def test_parameters_neither_overflow_nor_vanish() -> None:
    for port, value in Pool().values(looking()).items():
        if port.role is Role.PARAMETER:
            assert value.abs().max() < 0.2 and value.abs().median() > 1e-3


def test_graphs_share_memory_by_shape() -> None:
    pool = Pool()
    sizes = {id(value): value.nbytes for part in (looking(), looking()) for value in pool.values(part).values()}
    assert sum(sizes.values()) == sum(value.nbytes for value in Pool().values(looking()).values())
    twice = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = pool.values(capture(twice, (torch.zeros(2, 4),), loss=lambda y, _: y.sum(), target=torch.zeros(2)))
    assert values[Port(Role.PARAMETER, "0.weight")] is not values[Port(Role.PARAMETER, "1.weight")]
