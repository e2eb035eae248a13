"""The data plane of several ranks in a simulated world: the library's own core, on a seeded network and a virtual clock.

In: seeds, and the kinds of fault that may happen. Out: how often each fault came about and each rule of the core was met; or
the seed that failed, with what is wrong, the last events and the state of all ranks. The world is C++ (`src/sim/`), compiled
here with the core's sources into a library of its own, with short fragments, so that thousands of schedules take seconds.

    python -m helixrt.emulate.native_world --first 0 --count 10000     # or --seed N to see one
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from helixrt import native
from helixrt.native.flat import flatten
from helixrt.protocol.collective.algorithms import choice, direct
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Plan, Receive, Region, Send, Space

SOURCES = Path(native.__file__).with_name("src")
FRAGMENT_BYTES = 256
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden")
COMPILE_S = 600.0
REPORT_BYTES = 1 << 18
SURVIVED = ("break", "break_all", "rail_dead", "refuse", "slow", "black_hole", "pause")
FATAL = ("long_pause", "stop", "die", "vanish", "abort", "deadline", "mismatch", "leave", "cut_off", "lose")
ALL_FAULTS = (*SURVIVED, *FATAL)
COLLECTIVE, POINT, MESSAGE = range(3)
SIZES = (2, 3, 4, 5)


class Failed(Exception):
    """A rule does not hold in a schedule. The message has the line that replays it."""


# ---- building


def build(folder: Path, sources: Path = SOURCES, fragment_bytes: int = FRAGMENT_BYTES, flags: Sequence[str] = ()) -> Path:
    """Compile `sources` and their simulation into `folder`, file by file; objects of equal text are kept."""
    compiler = _compiler()
    command = (*compiler, *FLAGS, f"-DHX_FRAGMENT_BYTES={fragment_bytes}", *flags)
    headers = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources.rglob("*.hpp"))))
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        digest = hashlib.sha256(repr(command).encode() + headers.digest() + source.read_bytes()).hexdigest()[:16]
        made = folder / f"{source.stem}-{digest}.o"
        if not made.exists():
            part = made.with_suffix(f".{os.getpid()}")
            _run((*command, "-c", str(source), "-o", str(part)))
            part.replace(made)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sorted([*sources.glob("*.cpp"), *sources.glob("sim/*.cpp")])))
    library = folder / f"sim-{hashlib.sha256(repr(objects).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        _run((*command, "-shared", *map(str, objects), "-o", str(part)))
        part.replace(library)
    return library


def _compiler() -> tuple[str, ...]:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return tuple(words)
    return (sys.executable, "-m", "ziglang", "c++")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")


# ---- what ranks do


@dataclass(frozen=True)
class Part:
    """What one rank has of a shape: `plan` or none, its block of memory, and of which sums of sources its result consists.

    Element i of out is the sum of element `indices[i]` of the sources of the parts that `masks[i]` has a bit for.
    """

    plan: Plan | None
    source_at: int
    source_bytes: int
    out_at: int
    out_bytes: int
    masks: np.ndarray
    indices: np.ndarray
    in_place: bool = False
    takes_part: bool = True


@dataclass(frozen=True)
class Shape:
    form: int
    element: int
    parts: tuple[Part, ...]


GAP_BYTES = 64
_NONE = np.zeros(0, np.int64)
ABSENT = Part(None, 0, 0, 0, 0, _NONE, _NONE, takes_part=False)


def _apart(plan: Plan | None, element: int, source: int, masks: np.ndarray, indices: np.ndarray) -> Part:
    """Source of `source` elements and out lie apart."""
    return Part(plan, 0, source * element, source * element + GAP_BYTES, len(masks) * element, masks, indices)


def _of_all(size: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements `first` to `first + count` of the sum over all ranks."""
    return np.full(count, (1 << size) - 1, np.int64), np.arange(first, first + count, dtype=np.int64)


def _of_each(sources: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(rank, first, count): elements of one rank after the other."""
    masks = [np.full(count, 1 << rank, np.int64) for rank, _, count in sources]
    indices = [np.arange(first, first + count, dtype=np.int64) for _, first, count in sources]
    return np.concatenate([_NONE, *masks]), np.concatenate([_NONE, *indices])


def _all_reduce(size: int, count: int, element: int, tuning: Tuning, in_place: bool, on_arrival: bool) -> Shape:
    def part(rank: int) -> Part:
        plan = choice.all_reduce(rank, size, count * element, element, tuning, in_place, on_arrival)
        if not in_place:
            return _apart(plan, element, count, *_of_all(size, 0, count))
        return Part(plan, 0, count * element, 0, count * element, *_of_all(size, 0, count), in_place=True)

    return Shape(COLLECTIVE, element, tuple(map(part, range(size))))


def _reduce_scatter(counts: Sequence[int], element: int, tuning: Tuning, in_place: bool, on_arrival: bool) -> Shape:
    begins = [0, *itertools.accumulate(counts)]

    def part(rank: int) -> Part:
        plan = choice.reduce_scatter(rank, [n * element for n in counts], element, tuning, in_place, on_arrival)
        result = _of_all(len(counts), begins[rank], counts[rank])
        if not in_place:
            return _apart(plan, element, begins[-1], *result)
        return Part(plan, 0, begins[-1] * element, begins[rank] * element, counts[rank] * element, *result, in_place=True)

    return Shape(COLLECTIVE, element, tuple(map(part, range(len(counts)))))


def _all_gather(counts: Sequence[int], element: int, tuning: Tuning, in_place: bool) -> Shape:
    begins = [0, *itertools.accumulate(counts)]
    result = _of_each([(rank, 0, n) for rank, n in enumerate(counts)])

    def part(rank: int) -> Part:
        plan = choice.all_gather(rank, [n * element for n in counts], element, tuning, in_place)
        if not in_place:
            return _apart(plan, element, counts[rank], *result)
        return Part(plan, begins[rank] * element, counts[rank] * element, 0, begins[-1] * element, *result, in_place=True)

    return Shape(COLLECTIVE, element, tuple(map(part, range(len(counts)))))


def _broadcast(size: int, root: int, count: int, element: int, tuning: Tuning) -> Shape:
    plans = [choice.broadcast(rank, size, root, count * element, element, tuning) for rank in range(size)]
    return Shape(COLLECTIVE, element, tuple(_apart(plan, element, count, *_of_each([(root, 0, count)])) for plan in plans))


def _reduce(size: int, root: int, count: int, element: int, tuning: Tuning) -> Shape:
    plans = [choice.reduce(rank, size, root, count * element, element, tuning) for rank in range(size)]
    if any(_uses_out(plan) for rank, plan in enumerate(plans) if rank != root):
        raise AssertionError("a rank that is not the root writes its out")
    result = [_of_all(size, 0, count) if rank == root else (_NONE, _NONE) for rank in range(size)]
    return Shape(COLLECTIVE, element, tuple(_apart(plan, element, count, *result[rank]) for rank, plan in enumerate(plans)))


def _uses_out(plan: Plan) -> bool:
    flat = flatten(plan)
    return any(flat.nodes[i + 5 + 2 * k] == 1 for i in range(0, len(flat.nodes), 13) for k in range(4))


def _all_to_all(size: int, count: int, element: int, tuning: Tuning) -> Shape:
    counts = [[(a * 2 + b) % 3 * count for b in range(size)] for a in range(size)]  # [from][to]

    def part(rank: int) -> Part:
        sent, received = ([n * element for n in row] for row in (counts[rank], [row[rank] for row in counts]))
        plan = direct.all_to_all(rank, sent, received, element, tuning)
        result = _of_each([(a, sum(counts[a][:rank]), counts[a][rank]) for a in range(size)])
        return _apart(plan, element, sum(counts[rank]), *result)

    return Shape(COLLECTIVE, element, tuple(map(part, range(size))))


def _point(size: int, sender: int, receiver: int, counts: Sequence[int]) -> Shape:
    """Several messages of bytes, one behind the other."""
    begins = [0, *itertools.accumulate(counts)]

    def plan(make: type[Send] | type[Receive], peer: int, space: Space) -> Plan:
        nodes = tuple(make(peer, i, Region(space, begins[i], n)) for i, n in enumerate(counts))
        return Plan(nodes, tuple(() for _ in nodes))

    parts = [ABSENT] * size
    parts[sender] = _apart(plan(Send, receiver, Space.SOURCE), 1, begins[-1], _NONE, _NONE)
    parts[receiver] = _apart(plan(Receive, sender, Space.OUT), 1, 0, *_of_each([(sender, 0, begins[-1])]))
    return Shape(POINT, 1, tuple(parts))


def _message(count: int) -> Shape:
    return Shape(MESSAGE, 1, (_apart(None, 1, count, _NONE, _NONE), _apart(None, 1, 0, *_of_each([(0, 0, count)]))))


def shapes_of(size: int, fragment: int) -> Iterator[Shape]:
    """All algorithms of the product, for lengths from nothing to three fragments."""
    tunings = (
        Tuning(fragment, 2, fragment // 4, direct_bytes=1 << 40),
        Tuning(fragment, 2, fragment // 4, direct_bytes=0),
        Tuning(fragment, 2, fragment // 4, direct_bytes=0, two_step_bytes=0),
        Tuning(fragment, 2, fragment // 4, direct_bytes=0, two_step_bytes=0, halving_bytes=0),
    )
    lengths = (0, 8, fragment // 4, fragment // 2, fragment + 8, 3 * fragment)
    for number, (length, tuning) in enumerate(itertools.product(lengths, tunings)):
        element = (4, 8)[number % 2]
        count = length // element
        counts = [(0, 1, 2)[(rank + number) % 3] * count // 2 for rank in range(size)]
        yield _all_reduce(size, count, element, tuning, number % 3 == 0, number % 4 != 0)
        yield _reduce_scatter(counts, element, tuning, number % 3 == 0, number % 4 != 1)
        yield _all_gather(counts, element, tuning, number % 3 == 1)
        yield _broadcast(size, number % size, count, element, tuning)
        yield _reduce(size, number % size, count, element, tuning)
        if number % 2:
            yield _all_to_all(size, count // 2, element, tuning)
    for sender, receiver in itertools.permutations(range(size), 2):
        yield _point(size, sender, receiver, (fragment // 2, 0, 3, fragment + 1))
        yield _point(size, sender, receiver, (3 * fragment, 7))


# ---- running


class Simulation:
    """The compiled world, with all plans registered. Use as a context manager."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
        for name, result, arguments in (
            ("new", pointer, []),
            ("free", None, [pointer]),
            ("fragment_bytes", number, []),
            ("count_name", text, [ctypes.c_int32]),
            ("shape", None, [pointer, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
            (
                "part",
                ctypes.c_int32,
                [pointer, pointer, number, pointer, pointer, number, pointer, pointer, pointer, pointer, number],
            ),
            ("run", ctypes.c_int32, [pointer, ctypes.c_uint64, ctypes.c_uint32, pointer, pointer, number]),
            ("many", number, [pointer, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32, pointer]),
        ):
            function = getattr(self.library, f"hx_sim_{name}")
            function.restype, function.argtypes = result, arguments
        names = map(self.library.hx_sim_count_name, itertools.count())
        self.names = [name.decode() for name in iter(partial(next, names), None)]
        self._catalogue = self.library.hx_sim_new()
        fragment = self.library.hx_sim_fragment_bytes()
        for size in SIZES:
            for shape in shapes_of(size, fragment):
                self._add(size, shape)
        for count in (0, 1, fragment // 2, fragment, fragment + 1, 3 * fragment):
            self._add(2, _message(count))

    def _add(self, size: int, shape: Shape) -> None:
        self.library.hx_sim_shape(self._catalogue, shape.form, size, shape.element)
        why = ctypes.create_string_buffer(1024)

        def at(numbers: array[int]) -> int:
            return numbers.buffer_info()[0]

        for part in shape.parts:
            end = max(part.source_at + part.source_bytes, part.out_at + part.out_bytes)
            layout = array(
                "q", (part.takes_part, part.in_place, end, part.source_at, part.source_bytes, part.out_at, part.out_bytes)
            )
            masks, indices = array("q", part.masks.tolist()), array("q", part.indices.tolist())
            add = partial(self.library.hx_sim_part, self._catalogue)
            rest = (at(layout), at(masks), at(indices), why, len(why))
            if part.plan is None:
                done = add(None, -1, None, None, 0, *rest)
            else:
                flat = flatten(part.plan)
                done = add(at(flat.nodes), flat.count, at(flat.after), at(flat.after_begin), flat.scratch_bytes, *rest)
            if done:
                raise AssertionError(why.value.decode())

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.hx_sim_free(self._catalogue)

    def bits(self, faults: Sequence[str]) -> int:
        return sum(1 << self.names.index(name) for name in faults)

    def run(self, seed: int, faults: Sequence[str] = ALL_FAULTS) -> dict[str, int]:
        """One seed. Returns the counts; raises Failed."""
        counts = (ctypes.c_int64 * len(self.names))()
        why = ctypes.create_string_buffer(REPORT_BYTES)
        if self.library.hx_sim_run(self._catalogue, seed, self.bits(faults), counts, why, len(why)):
            chosen = "" if tuple(faults) == ALL_FAULTS else f" --faults {','.join(faults)}"
            raise Failed(
                f"replay: python -m helixrt.emulate.native_world --seed {seed}{chosen}\n{why.value.decode(errors='replace')}"
            )
        return dict(zip(self.names, counts, strict=True))

    def many(self, first: int, count: int, threads: int = 1, faults: Sequence[str] = ALL_FAULTS) -> dict[str, int]:
        """Seeds `first` to `first + count`. Returns the counts; raises Failed with the least seed that failed."""
        counts = (ctypes.c_int64 * len(self.names))()
        failed = self.library.hx_sim_many(self._catalogue, first, count, threads, self.bits(faults), counts)
        if failed >= 0:
            self.run(failed, faults)
            raise Failed(f"seed {failed} failed, and did not when it was run again")
        return dict(zip(self.names, counts, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m helixrt.emulate.native_world", description="Run the data plane in a simulated world."
    )
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--faults", default=",".join(ALL_FAULTS), help="the kinds that may happen, with commas between")
    parser.add_argument("--fragment-bytes", type=int, default=FRAGMENT_BYTES)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir(), f"helixrt-sim-{os.getuid()}"), help="for what is compiled"
    )
    parser.add_argument("--sources", type=Path, default=SOURCES)
    given = parser.parse_args(arguments)
    faults = tuple(filter(None, given.faults.split(",")))
    with Simulation(build(given.folder, given.sources, given.fragment_bytes)) as simulation:
        run: Callable[[], dict[str, int]] = partial(simulation.many, given.first, given.count, given.threads, faults)
        if given.seed is not None:
            run = partial(simulation.run, given.seed, faults)
        try:
            print({name: count for name, count in run().items() if count})
        except Failed as failed:
            print(failed)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
