"""One rank plans for its group: others get its order, or its error, however long it searches."""

from __future__ import annotations

import time
from typing import Any

import pytest

from helixrt.passes.errors import DisagreementError
from helixrt.passes.operators import Kind, Operator
from helixrt.passes.pair import Pairing, pair
from helixrt.pipeline import shared_plan
from helixrt.pipeline.shared_plan import planned_by_first
from tests.passes.strand_pairs import even

FORWARD = (Operator("a", Kind.COMPUTE, 5.0), Operator("b", Kind.INTER, 9.0, (0,)), Operator("w", Kind.WAIT, 0.0, (1,)))
BACKWARD = (Operator("c", Kind.INTER, 4.0), Operator("v", Kind.WAIT, 0.0, (0,)), Operator("d", Kind.COMPUTE, 7.0, (1,)))
STRANDS, OVERLAP = (FORWARD, BACKWARD), even(1.0)


@pytest.mark.system
def test_others_get_the_first_ranks_order(run_stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_plan, "DEADLINE_S", 3.0)

    def rank(rank: int, group: Any) -> Pairing:
        def search() -> Pairing:
            assert rank == 0, "only the first rank searches"
            time.sleep(4.0)  # longer than the deadline, which is for answers
            return pair(*STRANDS, OVERLAP)

        return planned_by_first(group, search, STRANDS, OVERLAP)

    first, *others = run_stages(3, rank)
    assert first.order != tuple((which, index) for which in (0, 1) for index in range(3))
    for other in others:
        assert (other.policy, other.order, other.timing, other.pairs) == (first.policy, first.order, first.timing, first.pairs)
        assert (other.bound_us, other.sequential_us) == (first.bound_us, first.sequential_us)


def test_a_failed_search_is_told_to_all(run_stages: Any) -> None:
    def rank(rank: int, group: Any) -> None:
        def search() -> Pairing:
            raise ValueError("no order at all")

        with pytest.raises(DisagreementError if rank else ValueError, match="no order at all"):
            planned_by_first(group, search, STRANDS, OVERLAP)

    run_stages(2, rank)


def test_one_process_plans_alone() -> None:
    found = pair(*STRANDS, OVERLAP)
    assert planned_by_first(None, lambda: found, STRANDS, OVERLAP) is found
