"""The ledger against a set: whatever comes in whatever order, each number is taken once and all of them are known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helixrt.protocol.link.frames import MAX_RANGES
from helixrt.protocol.link.ledger import Ledger


@given(st.lists(st.integers(1, 40), max_size=80))
def test_a_ledger_is_a_set_of_what_was_taken(sequences: list[int]) -> None:
    ledger, oracle = Ledger(), set()
    for sequence in sequences:
        assert ledger.take(sequence) is (sequence not in oracle)
        oracle.add(sequence)
        first_missing = next(number for number in range(1, 99) if number not in oracle)
        assert ledger.floor == first_missing - 1 and ledger.above == {number for number in oracle if number > first_missing}
        assert all((number in ledger) is (number in oracle) for number in range(1, 45))
    spans = ledger.ranges()
    assert {number for first, last in spans for number in range(first, last + 1)} == ledger.above
    ends = [ledger.floor, *(end for span in spans for end in span)]
    assert ends == sorted(ends) and all(after[0] > before[1] + 1 for before, after in zip(spans, spans[1:], strict=False))


def test_the_first_ranges_are_told_when_there_are_too_many() -> None:
    ledger = Ledger()
    for number in range(2, 2 * MAX_RANGES + 100, 2):
        ledger.take(number)
    assert ledger.ranges() == tuple((number, number) for number in range(2, 2 * MAX_RANGES + 1, 2))
