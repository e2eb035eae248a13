"""The library refuses what is no plan with a sentence that names the node, and reads what is one."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helixrt.errors import ConfigError
from helixrt.native import build
from helixrt.native.flat import FIELDS, Flat, flatten
from helixrt.protocol.collective.algorithms import choice
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Copy, Plan, Receive, Reduce, Region, Send, Space

pytestmark = pytest.mark.system
SIZE = 4
A, B = Region(Space.SOURCE, 0, 24), Region(Space.OUT, 8, 24)
S = Region(Space.SCRATCH, 16, 24)
PLAN = Plan(
    (Send(3, 0, A), Send(1, 0, B), Receive(2, 0, S), Reduce(A, S, (B,), True), Copy(A, B), Send(3, 1, B)),
    ((), (), (0,), (0, 2), (), (2, 3, 4)),
    40,
)
KIND, PEER, INDEX, FLAGS, BYTES, SPACE, OFFSET = range(7)
SMALL = Tuning(128, 2, 64, direct_bytes=0, two_step_bytes=0, halving_bytes=0)


class Probe:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.hx_test_list.restype = ctypes.c_int64

    def refused(self, flat: Flat, size: int = SIZE, count: int | None = None) -> str:
        """Why it is no plan; empty for a plan."""
        why = ctypes.create_string_buffer(1024)
        fields = (flat.nodes, flat.after, flat.after_begin)
        arrays = [(ctypes.c_int64 * len(field)).from_buffer(field) if field else None for field in fields]
        numbers = [ctypes.c_int64(n) for n in (size, flat.count if count is None else count, flat.scratch_bytes)]
        is_plan = self._library.hx_test_plan(
            numbers[0], arrays[0], numbers[1], arrays[1], arrays[2], numbers[2], why, ctypes.c_size_t(1024)
        )
        text = why.value.decode()
        assert bool(is_plan) == (not text)
        return text

    def list(self, name: str, peer: int = 0) -> list[int]:
        into = (ctypes.c_int64 * 10_000)()
        length = self._library.hx_test_list(name.encode(), ctypes.c_int64(peer), into)
        assert length >= 0
        return list(into[:length])


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    out = tmp_path_factory.mktemp("probe") / "probe.so"
    try:
        compiler = build.find_compiler()
    except ConfigError as error:
        pytest.skip(str(error))
    build.compile_library(out, compiler, files=[build.FOLDER / "src" / "plan.cpp", Path(__file__).with_name("plan_probe.cpp")])
    yield Probe(ctypes.CDLL(str(out)))


def changed(node: int, field: int, value: int) -> Flat:
    flat = flatten(PLAN)
    flat.nodes[node * FIELDS + field] = value
    return flat


def after(entry: int, value: int) -> Flat:
    flat = flatten(PLAN)
    flat.after[entry] = value
    return flat


def begins(*values: int) -> Flat:
    return replace(flatten(PLAN), after_begin=array("q", values))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: changed(1, KIND, 4), "node 1: kind 4 is not in [0, 4)"),
        (lambda: changed(1, KIND, -1), "node 1: kind -1 is not in [0, 4)"),
        (lambda: changed(0, PEER, SIZE), "node 0: peer 4 is not in [0, 4)"),
        (lambda: changed(2, PEER, -1), "node 2: peer -1 is not in [0, 4)"),
        (lambda: changed(2, PEER, 1 << 32), "node 2: peer 4294967296 is not in [0, 4)"),
        (lambda: changed(5, INDEX, 2), "node 5: index 2 of the message to peer 3 should be 1"),
        (lambda: changed(5, INDEX, 0), "node 5: index 0 of the message to peer 3 should be 1"),
        (lambda: changed(2, INDEX, -1), "node 2: index -1 of the message from peer 2 should be 0"),
        (lambda: changed(0, FLAGS, 1), "node 0: flags 1 do not belong to kind 0"),
        (lambda: changed(2, FLAGS, 4), "node 2: flags 4 do not belong to kind 1"),
        (lambda: changed(3, FLAGS, 2), "node 3: flags 2 do not belong to kind 2"),
        (lambda: changed(3, FLAGS, -1), "node 3: flags -1 do not belong to kind 2"),
        (lambda: changed(4, FLAGS, 1 << 40), "node 4: flags 1099511627776 do not belong to kind 3"),
        (lambda: changed(4, BYTES, -1), "node 4: length -1 is not in"),
        (lambda: changed(4, BYTES, (1 << 63) - 1), "node 4: length 9223372036854775807 is not in"),
        (lambda: changed(0, SPACE, 3), "node 0: space 3 is not in [0, 3)"),
        (lambda: changed(3, SPACE + 2, -1), "node 3: space -1 is not in [0, 3)"),
        (lambda: changed(3, SPACE + 4, 3), "node 3: space 3 is not in [0, 3)"),
        (lambda: changed(4, OFFSET + 4, -8), "node 4: offset -8 is not in"),
        (lambda: changed(0, OFFSET, (1 << 63) - 8), "node 0: offset 9223372036854775800 is not in"),
        (lambda: after(0, 2), "node 2: predecessor 2 is not in [0, 2)"),
        (lambda: after(2, -1), "node 3: predecessor -1 is not in [0, 3)"),
        (lambda: after(3, 6), "node 5: predecessor 6 is not in [0, 5)"),
        (lambda: begins(1, 1, 1, 1, 3, 3, 6), "predecessors begin at entry 1, not 0"),
        (lambda: begins(0, 0, 0, 1, 0, 3, 6), "node 3: its predecessors end at entry 0"),
        (lambda: begins(0, 0, 0, 1, 3, 3, 1 << 40), "node 5: its predecessors end at entry 1099511627776"),
        (lambda: replace(flatten(PLAN), scratch_bytes=39), "it uses 40 bytes of scratch memory of 39"),
        (lambda: replace(flatten(PLAN), scratch_bytes=-1), "scratch memory of -1 bytes"),
    ],
)
def test_what_is_no_plan_is_refused(probe: Probe, make: Callable[[], Flat], sentence: str) -> None:
    assert probe.refused(make()).startswith(sentence)


def test_places_of_flags_are_read(probe: Probe) -> None:
    on_arrival, twice = flatten(Plan((Receive(0, 0, B, A),), ((),))), flatten(Plan((Reduce(A, A, (B, B)),), ((),)))
    assert probe.refused(on_arrival) == probe.refused(twice) == ""
    on_arrival.nodes[SPACE + 2] = twice.nodes[SPACE + 6] = 7
    assert probe.refused(on_arrival) == probe.refused(twice) == "node 0: space 7 is not in [0, 3)"


def test_sizes_that_cannot_be(probe: Probe) -> None:
    assert probe.refused(flatten(PLAN), size=0) == "a plan needs at least one rank, not 0"
    assert probe.refused(flatten(PLAN), count=-1).startswith("number of nodes -1 is not in")
    assert probe.refused(flatten(PLAN), count=1 << 40).startswith("number of nodes 1099511627776 is not in")


def test_what_is_a_plan_is_read(probe: Probe) -> None:
    assert probe.refused(flatten(PLAN)) == ""
    assert probe.list("waits") == [0, 0, 1, 2, 0, 3]
    assert probe.list("next_begin") == [0, 2, 2, 4, 5, 6, 6]
    assert probe.list("next") == [2, 3, 3, 5, 5, 5]
    assert probe.list("roots") == [0, 1, 4]
    assert [probe.list("sends", peer) for peer in range(SIZE)] == [[], [1], [], [0, 5]]
    assert [probe.list("receives", peer) for peer in range(SIZE)] == [[], [], [2], []]
    assert probe.list("prompt") == [1, 0, 1, 1, 1, 0]
    assert probe.list("most") == [24, 32, 40]
    assert probe.list("counts") == [6, 1, 40]


def test_no_nodes(probe: Probe) -> None:
    assert probe.refused(flatten(Plan((), ())), size=1) == ""
    assert probe.list("next_begin") == [0] and probe.list("most") == [0, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_plans_of_the_algorithms(probe: Probe, size: int) -> None:
    """Against the index that Python works out of the same plan."""
    for tuning in (SMALL, Tuning()):
        for plan in (
            choice.all_reduce(size - 1, size, 4096, 8, tuning, False, True),
            choice.all_gather(0, [800] * size, 8, tuning),
            choice.reduce(0, size, 0, 4096, 8, tuning),
        ):
            assert probe.refused(flatten(plan), size) == ""
            index = plan.index
            assert probe.list("waits") == list(index.waits_for) and probe.list("roots") == list(index.roots)
            begin, later = probe.list("next_begin"), probe.list("next")
            assert [tuple(later[a:b]) for a, b in zip(begin, begin[1:], strict=False)] == list(index.before)
            for name, expected in (("sends", index.sends), ("receives", index.receives)):
                assert [tuple(probe.list(name, peer)) for peer in range(size)] == [
                    expected[peer] if peer < len(expected) else () for peer in range(size)
                ]
