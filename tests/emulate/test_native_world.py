"""The native core in a simulated world: every rule holds in every schedule, and each mutation of the core is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helixrt.emulate.native_world import ALL_FAULTS, SOURCES, SURVIVED, Failed, Simulation, build

pytestmark = pytest.mark.system  # they need the compiled library

SHORT, LONG, MUTATED = 3_000, 200_000, 20_000
RULES = (  # what must have come about, else the schedules show nothing of it
    *("ok", "failed", "skipped", "messages", "rail_left", "rail_back", "resumes", "duplicates", "again", "continued", "eager"),
    *("credits", "wants", "window_full", "probes", "ranges", "beats", "closed"),
    *("end_aborted", "end_peer", "end_deadline", "end_mismatch"),
)
MUTATIONS = {  # name: file, what is there, what is there instead
    "the ledger takes a sequence twice": ("inbox.cpp", "if (ledger.has(h.sequence)) return", "if (false) return"),
    "what a failed rail had yet to write is given up": (
        "link_rails.cpp",
        "flight.queued = false, outbox_.again(&flight);",
        "flight.queued = false;",
    ),
    "acknowledged one too far": (
        "link.cpp",
        "std::vector<u64> body{inbox_.ledger.floor(),",
        "std::vector<u64> body{inbox_.ledger.floor() + 1,",
    ),
    "what came before a failure comes again": ("inbox.cpp", "if (position < p->taken) {", "if (false) {"),
    "the carry of an element is dropped": ("inbox.cpp", "p->carry = u32(have - use);", "p->carry = 0;"),
    "the answer to RESUME is ignored": (
        "link.cpp",
        "for (Flight* flight : std::exchange(lost_, {})) outbox_.again(flight);",
        "lost_.clear();",
    ),
    "the window is ignored": (
        "outbox.hpp",
        "return !bytes_ || bytes_ + bytes <= options_.window_bytes;",
        "return bytes_ + bytes + 1 > 0;",
    ),
    "deadlines are not checked": ("core.cpp", "if (now_ < each->call.deadline) continue;", "if (true) continue;"),
    "memory stays attached at an end": ("link_rails.cpp", "  inbox_.detach();\n", ""),
    "early memory is not given back": ("inbox.cpp", "early_ -= message.eager;", ""),
    "a message that was kept is read from its caller": ("outbox.cpp", "flight.data = m.data + flight.header.offset;", ";"),
    "silence is no death": (
        "link_rails.cpp",
        "if (!heard_ || silence < limit) return;",
        "if (!heard_ || silence < limit || up) return;",
    ),
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulation")


@pytest.fixture(scope="module")
def world(objects: Path) -> Iterator[Simulation]:
    with Simulation(build(objects)) as found:
        yield found


def assert_all_met(counts: dict[str, int]) -> None:
    missing = [name for name in (*ALL_FAULTS, *RULES) if not counts[name]]
    assert not missing, f"never met: {missing} in {counts}"


def test_schedules(world: Simulation) -> None:
    assert_all_met(world.many(0, SHORT, 2))


def test_rails_alone_end_nothing(world: Simulation) -> None:
    counts = world.many(1_000_000, 500, 2, SURVIVED)
    assert counts["operations"] == counts["ok"] > 0 and not counts["end_peer"]


def test_a_seed_repeats(world: Simulation) -> None:
    assert world.run(7) == world.run(7)
    assert world.run(7) == world.many(7, 1)


def test_a_failure_names_its_seed(objects: Path, tmp_path: Path) -> None:
    with Simulation(build(objects, mutated(tmp_path, *MUTATIONS["the carry of an element is dropped"]))) as world:
        with pytest.raises(Failed, match=r"helixrt\.emulate\.native_world --seed \d+\nrank \d.*a wrong result") as found:
            world.many(0, MUTATED, 2)
        seed = int(str(found.value).split("--seed ")[1].split()[0])
        with pytest.raises(Failed) as again:
            world.run(seed)
        assert str(again.value) == str(found.value)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_many_schedules(world: Simulation) -> None:
    assert_all_met(world.many(10_000, LONG, 2))


@pytest.mark.slow
def test_the_product_s_fragments(objects: Path) -> None:
    """With fragments of 1 MiB, as the product has them."""
    with Simulation(build(objects, fragment_bytes=1 << 20)) as world:
        world.many(0, 40, 2)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name: str, objects: Path, tmp_path: Path) -> None:
    with Simulation(build(objects, mutated(tmp_path, *MUTATIONS[name]))) as world, pytest.raises(Failed) as found:
        world.many(0, MUTATED, 2)
    print(f"{name}: {' '.join(str(found.value).splitlines()[:2])}")


def mutated(folder: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of the sources with one place changed."""
    sources = folder / "src"
    shutil.copytree(SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(right) == 1, f"{file} has {right!r} {text.count(right)} times"
    (sources / file).write_text(text.replace(right, wrong))
    return sources


def test_every_fault_has_a_name(world: Simulation) -> None:
    assert world.names[1 : 1 + len(ALL_FAULTS)] == list(ALL_FAULTS)
