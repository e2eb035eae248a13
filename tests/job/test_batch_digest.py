"""The digest of a batch: equal content is equal, a change of any kind is another, and of some things nothing is known."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from helixrt.job.batch_digest import PART_BYTES, WHOLE_BYTES, batch_digest, together
from helixrt.job.stream import Stream, StreamSettings
from helixrt.protocol.step.batches import PARTIAL
from helixrt.replica.store import MemoryRunStore
from tests.job.session_world import batches, ready, summed

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    label: int


@dataclass(slots=True)
class Slots:
    x: torch.Tensor


class Graph:
    """Of a library that helixrt does not know."""


def tokens(fill: int = 0) -> torch.Tensor:
    return torch.arange(64).view(8, 8) + fill


CHANGES: dict[str, tuple[Any, Any]] = {
    "a value": (tokens(), tokens(1)),
    "the shape": (tokens(), tokens().view(4, 16)),
    "the type": (tokens(), tokens().to(torch.int32)),
    "which of two": ((tokens(), tokens(1)), (tokens(1), tokens())),
    "a key": ({"a": tokens()}, {"b": tokens()}),
    "in a mapping of its own": (UserDict(a=tokens()), UserDict(a=tokens(1))),
    "in a named tuple": (Pair(tokens(), 1), Pair(tokens(), 2)),
    "in a data class": (Sample(tokens(), 1), Sample(tokens(), 2)),
    "in a data class with slots": (Slots(tokens()), Slots(tokens(1))),
    "a text": (["one"], ["two"]),
    "an array": (np.arange(5.0), np.arange(5.0) + 1),
    "half precision": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "how it is cut": ([[1, 2], [3]], [[1], [2, 3]]),
    "deep inside": ([{"a": (tokens(), [1.5])}], [{"a": (tokens(), [1.25])}]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_equal_content_gives_equal_digests_and_any_change_another(change: str) -> None:
    first, second = CHANGES[change]
    assert batch_digest(first) == batch_digest(first) != batch_digest(second)
    assert 0 < batch_digest(first) < PARTIAL


def test_the_layout_in_memory_does_not_count() -> None:
    assert batch_digest(tokens().t().contiguous().t()) == batch_digest(tokens())
    assert batch_digest(np.asfortranarray(tokens().numpy())) == batch_digest(tokens().numpy())


def test_of_large_tensors_parts_are_looked_at_from_end_to_end() -> None:
    large = torch.zeros(8 * WHOLE_BYTES, dtype=torch.uint8)
    before = batch_digest(large)
    for place in (0, len(large) - 1):
        large[place] = 1
        assert batch_digest(large) != before
        large[place] = 0
    large[len(large) // 2 : len(large) // 2 + 8 * PART_BYTES] = 1
    assert batch_digest(large) != before


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (Graph(), f"{__name__}.Graph"),
        ({"a": [Graph()]}, f"{__name__}.Graph"),
        (torch.zeros(2).to_sparse(), "torch.Tensor (torch.sparse_coo, torch.float32)"),
        (np.array([{}]), "numpy.ndarray"),
        ({1}, "builtins.set"),
    ],
    ids=["object", "object inside", "sparse", "array of objects", "set"],
)
def test_of_what_cannot_be_read_nothing_is_known_but_its_kind(batch: Any, kind: str) -> None:
    told: list[str] = []
    assert batch_digest(batch, told.append) == 0
    one, other = (batch_digest([batch, number], told.append) for number in (1, 2))
    assert one != other and one & PARTIAL == other & PARTIAL == PARTIAL == together([one, 1]) & PARTIAL
    assert told == [kind] * 3 and not batch_digest([1]) & PARTIAL


def test_of_batches_that_hold_nothing_nothing_is_known() -> None:
    assert batch_digest([]) == 0


@pytest.mark.parametrize(("batch", "what"), [(Graph(), "nor between"), ((tokens(), Graph()), "and between the ranks")])
def test_one_line_of_a_run_tells_of_batches_that_are_not_compared(batch: Any, what: str) -> None:
    store, said = MemoryRunStore(), list[str]()
    for stream in (Stream([batch] * 4, StreamSettings(replica), store, said.append) for replica in (0, 1)):
        for position in range(6):
            list(stream.take(position))
    (line,) = said
    assert line.startswith(f"a batch holds {__name__}.Graph, whose content") and f"not compared between streams, {what}" in line


def test_batches_count_in_their_order_and_one_that_is_not_known_makes_all_so() -> None:
    one, two = batch_digest(tokens()), batch_digest(tokens(1))
    assert together([one, two]) != together([two, one]) and together([one]) == one
    assert together([one, 0]) == 0 == together([0, two])
    late = torch.tensor(one), torch.tensor(two)
    assert int(together(late)) == together([one, two]) == int(together([one, late[1]])), "a device's arithmetic gives the same"
    assert int(together([late[0] | PARTIAL, two])) == together([one | PARTIAL, two]) >= PARTIAL


def test_the_digest_of_a_step_is_known_before_the_work_on_its_last_batch() -> None:
    """An engine may hand out its last bucket while it works, and the exchange takes the digest along with that."""
    session, model = ready()
    for step in session.steps(batches(), until=2, accumulate=3):
        for number, (x, y) in enumerate(step, 1):
            assert (step._order.note.digest != 0) == (number == 3)
            step.backward(summed(model, x, y))
        step.commit()
