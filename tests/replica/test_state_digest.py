"""A digest of the state, part by part: any flipped bit is found in the turn of its part, and nothing else is."""

from __future__ import annotations

import random

import pytest
import torch

from helixrt.protocol.step.attempt import Attempt
from helixrt.protocol.step.lineage import genesis
from helixrt.protocol.step.messages import Differ, RankDone
from helixrt.protocol.step.quorum import Assessment, Member, successor
from helixrt.replica.contracts import Engine, State
from helixrt.replica.state_digest import StateWatch

EVERY = 7


class Held(Engine):
    """Holds this state, and computes nothing."""

    buckets = ()
    begin = end = apply = load = None  # type: ignore[assignment]

    def __init__(self, state: State) -> None:
        self._state = state

    def state(self) -> State:
        return self._state


def state(extra: bool = True) -> State:
    chance = torch.Generator().manual_seed(3)
    tensors = {
        "parameter/a": torch.randn(311, 13, generator=chance),
        "parameter/half": torch.randn(77, generator=chance).to(torch.bfloat16),
        "buffer/odd": torch.arange(13, dtype=torch.uint8),
        "optimizer/0/state/a/step": torch.tensor(5.0),
        "optimizer/0/state/a/exp_avg": torch.randn(13, 311, generator=chance).t(),  # not in the order of its memory
        "buffer/empty": torch.zeros(0),
        "buffer/flag": torch.tensor([True, False, True]),
    }
    return State(tensors, {"optimizer/0/group/0/lr": 0.1} if extra else {})


def digests(held: State) -> list[int]:
    watch = StateWatch(Held(held), EVERY)
    return [int(watch.part(step)[0]) for step in range(EVERY)]


def test_equal_states_have_equal_digests_whatever_the_order_of_their_entries() -> None:
    turned = State(dict(reversed(list(state().tensors.items()))), state().scalars)
    assert digests(state()) == digests(state()) == digests(turned) and min(digests(state())) > 0
    assert int(StateWatch(Held(state()), EVERY).part(EVERY + 2)[0]) == digests(state())[2], "turns go on"


def test_any_flipped_bit_is_found_in_one_turn() -> None:
    usual, chance = digests(state()), random.Random(5)
    for _ in range(300):
        spoilt = state()
        name = chance.choice([name for name, tensor in spoilt.tensors.items() if tensor.numel()])
        tensor = spoilt.tensors[name]
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        place = chance.randrange(len(memory))
        memory[place] ^= 1 if tensor.dtype is torch.bool else 1 << chance.randrange(8)
        differ = [turn for turn, (one, other) in enumerate(zip(usual, digests(spoilt), strict=True)) if one != other]
        assert len(differ) == 1, (name, place)
        first, _, last = StateWatch(Held(spoilt), EVERY).part(differ[0])[1].partition(" to ")
        assert first == "scalars" or first <= name <= (last or first), "the entries that are told have it"


def test_a_scalar_that_differs_is_found() -> None:
    other = State(state().tensors, {"optimizer/0/group/0/lr": 0.1000001})
    differ = [turn for turn, (one, two) in enumerate(zip(digests(state()), digests(other), strict=True)) if one != two]
    assert differ == [0]


def test_two_words_that_change_places_are_found() -> None:
    tensor = torch.arange(64, dtype=torch.int64)
    swapped = tensor.clone()
    swapped[[3, 40]] = tensor[[40, 3]]
    assert digests(State({"parameter/a": tensor})) != digests(State({"parameter/a": swapped}))


@pytest.mark.parametrize(
    ("held", "odd"),
    [
        ((5, 5, 5), None),
        ((5, 0, 5), None),
        ((5, 6, 5), (1,)),
        ((5, 6), ()),
        ((5, 6, 7, 5, 5), (1, 2)),
        ((5, 6, 6, 5), ()),
    ],
)
def test_the_odd_replica_is_known_where_most_agree(held: tuple[int, ...], odd: tuple[int, ...] | None) -> None:
    root = genesis("run", len(held))
    assessment = Assessment(root, tuple(range(len(held))), (), supersedes=False)
    members = tuple(Member(replica, 0, 0, root.hash) for replica in range(len(held)))
    attempt = Attempt(3, members, assessment, successor(assessment, 3, members), root.hash)
    attempt.answered(RankDone(3, 0, states=held, part="parameter/a"))
    found = attempt.differing_states(50)
    replicas = tuple(range(len(held)))
    assert found == (None if odd is None else Differ(3, 1, 0, 0, replicas, odd, "parameter/a"))
