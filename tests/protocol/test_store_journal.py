"""The journal of a run's store: whatever was answered stands after a crash at any byte, and nothing else does."""

from __future__ import annotations

import random

import pytest

from helixrt.protocol import store_journal
from helixrt.protocol.store_journal import Asked, Change, Identity, Refused, apply, decide, first_line, line_of, replay
from helixrt.protocol.store_journal import written_anew as anew
from helixrt.protocol.store_quorum import Delete, Get, PutIfAbsent, Set

ME = Identity("run", 2, "boot")


def some_operation(draw: random.Random) -> Asked:
    key, value = f"k{draw.randrange(6)}", "".join(draw.choices('ab\n"\\ü\u2028\0', k=draw.randrange(1, 9)))
    return draw.choice((Get(key), Set(key, value), PutIfAbsent(key, value), Delete(key)))


def test_a_crash_at_any_byte_leaves_every_operation_whole_or_not_at_all(seed: int) -> None:
    """The oracle is the list of values after each operation; a cut inside a line gives those of before it."""
    draw = random.Random(seed)
    values: dict[str, str] = {}
    data, after = first_line(ME), [(len(first_line(ME)), dict[str, str]())]
    for _ in range(60):
        _, change = decide(values, some_operation(draw))
        if change is not None:
            apply(values, change)
            data += line_of(change)
            after.append((len(data), dict(values)))
    for cut in range(after[0][0], len(data) + 1):
        expected = next((end, found) for end, found in reversed(after) if end <= cut)
        assert replay(data[:cut], ME) == (expected[1], expected[0])
    assert replay(anew(ME, values), ME)[0] == values


def test_operations_are_answered_like_a_dictionary(seed: int) -> None:
    draw, values, oracle = random.Random(seed), dict[str, str](), dict[str, str]()
    for _ in range(300):
        asked = some_operation(draw)
        answer, change = decide(values, asked)
        before = oracle.get(asked.key)
        if isinstance(asked, Get):
            assert answer == before
        elif isinstance(asked, PutIfAbsent):
            assert answer == oracle.setdefault(asked.key, asked.value)
        elif isinstance(asked, Set):
            oracle[asked.key] = asked.value
        else:
            oracle.pop(asked.key, None)
        assert (change is None) == (oracle.get(asked.key) == before), "a line only for what changes"
        if change is not None:
            apply(values, change)
        assert values == oracle


def test_an_operation_that_is_asked_again_gives_what_its_first_answer_said() -> None:
    values: dict[str, str] = {}
    mine = PutIfAbsent("log/3", "record of replica 0")
    for _ in range(2):
        answer, change = decide(values, mine)
        assert answer == mine.value
        if change is not None:
            apply(values, change)
    assert decide(values, PutIfAbsent("log/3", "record of replica 1"))[0] == mine.value


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (Identity("another", 2, "boot"), "life 2 of run run"),
        (Identity("run", 3, "boot"), "life 2 of run run"),
        (Identity("run", 2, "later"), "started again"),
        (Identity("run", 2, ""), "started again"),
    ],
)
def test_the_journal_of_another_store_is_refused(identity: Identity, why: str) -> None:
    with pytest.raises(Refused, match=why):
        replay(anew(ME, {"k": "v"}), identity)


def test_a_damaged_line_is_refused_and_not_passed_over() -> None:
    data = anew(ME, {"one": "1", "two": "2", "three": "3"})
    at = data.index(b"two")
    with pytest.raises(Refused, match="line 3 is damaged"):
        replay(data[:at] + b"T" + data[at + 1 :], ME)
    with pytest.raises(Refused, match="empty"):
        replay(data[:20], ME)
    with pytest.raises(Refused, match="version"):
        replay(line_of(Change("k", "v")), ME)


def test_a_journal_is_written_anew_once_it_has_grown_so_much() -> None:
    assert not store_journal.is_due(8 << 20, 100) and store_journal.is_due((8 << 20) + 1, 100)
    assert not store_journal.is_due(40 << 20, 10 << 20) and store_journal.is_due((40 << 20) + 1, 10 << 20)
