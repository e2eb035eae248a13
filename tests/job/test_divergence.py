"""Replicas whose states differ: what is named, when a way back is taken, and that its end is that of an undisturbed run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from helixrt.errors import Diverged
from helixrt.job import checkpoint as checkpoints
from helixrt.job.divergence import Divergence, Naming, differing, said
from helixrt.job.way_back import came_again
from helixrt.protocol.step.messages import Differ
from helixrt.replica.commands import Digest, Digested
from helixrt.replica.store import MemoryRunStore
from tests import programs
from tests.examples.test_existing_loop import run_under_torchrun

SCRIPT = Path(__file__).with_name("divergence_script.py")
EVERY = 5


def found(step: int, entry: str = "parameter/a", odd: tuple[int, ...] = (1,)) -> Divergence:
    return Divergence(step, step - EVERY - 1, 0, entry, odd, "they differ")


@pytest.mark.parametrize(
    ("entries", "entry", "odd"),
    [
        ([{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "c": 4}, {"a": 1, "b": 2, "c": 3}], "b", (1,)),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], "b", ()),
        ([{"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": 3, "b": 2}], "a", ()),
        ([{"b": 2, "a": 1}, {"b": 3, "a": 7}], "b", ()),
        ([{}, {"a": 1}], "a to c", ()),
    ],
)
def test_the_first_differing_entry_is_named_in_the_order_of_the_state(
    entries: list[dict[str, int]], entry: str, odd: tuple[int, ...]
) -> None:
    action = Differ(9, 12, 6, 1, tuple(range(len(entries))), (), "a to c")
    result = differing(action, dict(enumerate(entries)))
    assert (result.entry, result.odd, result.step, result.safe) == (entry, odd, 12, 6)
    assert f"before step 12: {entry} differs first (rank 1)" in result.text
    assert Divergence.from_plain(json.loads(result.to_json())) == result


def test_leaders_tell_each_other_what_their_entries_are() -> None:
    store, action = MemoryRunStore(), Differ(9, 12, 6, 0, (0, 1), (), "a to b")
    store.put_if_absent("differing/9/1", json.dumps({"a": 1, "b": 7}))
    digests: dict[int, Digested] = {}
    told: list[Any] = []

    def tell(command: Any) -> None:
        told.append(command)
        digests[0] = Digested("", "", (("a", 1), ("b", 2)))

    with pytest.raises(Diverged, match="replicas 0, 1 hold different states before step 12: b differs first"):
        Naming(store, 0, digests, tell, 5.0)(action)
    assert told == [Digest(entries=True)]
    known = said(store)
    assert known is not None and (known.entry, known.safe) == ("b", 6)
    assert said(MemoryRunStore()) is None


@pytest.mark.parametrize(
    ("now", "before", "again"),
    [
        (found(40), [], False),
        (found(40), [found(20, "parameter/b")], False),
        (found(40, odd=()), [found(20, odd=())], False),
        (found(40), [found(20)], True),
        (found(24, "parameter/b"), [found(20)], True),
        (found(60), [found(20, "parameter/b"), found(57, "parameter/c")], True),
    ],
)
def test_a_cause_that_comes_again_is_known(now: Divergence, before: list[Divergence], again: bool) -> None:
    assert came_again(now, before, EVERY) == again


def test_later_checkpoints_are_withdrawn_whatever_their_manifests_say(tmp_path: Path) -> None:
    folders = {step: tmp_path / f"step_{step:08d}_0123abcd" for step in (10, 20, 30)}
    for folder in folders.values():
        folder.mkdir()
        (folder / checkpoints.MANIFEST).write_text("no JSON")
    checkpoints.withdraw_after(tmp_path, 20)
    assert {step for step, folder in folders.items() if checkpoints.is_complete(folder)} == {10, 20}
    assert (folders[30] / checkpoints.WITHDRAWN).read_text() == "no JSON"


# ---------------------------------------------------------------- whole runs


def state_of(folder: Path) -> set[tuple[int, str]]:
    (path,) = {path.resolve() for path in folder.glob("out/2*/*/report.json")}
    return {(each["step"], each["state_digest"]) for each in json.loads(path.read_text())["replicas"]}


def run(folder: Path, replicas: int, flips: list[Any], *options: str) -> Any:
    folder.mkdir()
    return programs.output_of(SCRIPT, folder, str(replicas), json.dumps(flips), *options, timeout=140)


def flips_of(seed: int, replicas: int, count: int) -> list[Any]:
    """Apart from one another, in different replicas, and of entries that no step overwrites.

    Of the optimizer's state, only the upper two bytes of a number: the rounding of the next step can undo other changes.
    Whatever is flipped, a parameter is what differs first at the next check; the same one of the same replica twice is a
    cause that comes again, which ends a run.
    """
    chance = random.Random(seed)
    found = []
    for number, replica in enumerate(chance.sample(range(replicas), count)):
        entry = chance.choice(["parameter", "exp_avg", "exp_avg_sq", "step", "buffer"])
        byte = chance.randrange(0 if entry in ("parameter", "buffer") else 2, 4)
        place = 4 * chance.randrange(10**5) + byte
        found.append([3 + number * 4 * EVERY, replica, entry, place, chance.randrange(8)])
    return found


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_run_with_flipped_bits_ends_as_an_undisturbed_one(replicas: int, tmp_path: Path, seed: int) -> None:
    flips = flips_of(seed, replicas, 2)
    usual, disturbed = (run(tmp_path / name, replicas, given) for name, given in (("usual", []), ("flipped", flips)))
    assert usual.returncode == disturbed.returncode == 0, disturbed.stdout + disturbed.stderr
    assert state_of(tmp_path / "flipped") == state_of(tmp_path / "usual") and len(state_of(tmp_path / "usual")) == 1
    text = disturbed.stdout + disturbed.stderr
    assert text.count(" differs first (rank 0)") == text.count("where its state was found equal") == len(flips), text
    for _, replica, *_ in flips if replicas > 2 else ():
        assert f"the state of replica {replica} differs from that of the others" in text, text


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_run_with_a_keeper_goes_back(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", 2, [[8, 1, "parameter", 77, 5]], "until=40", "away=60")
    assert ended.returncode == 0 and "where its state was found equal" in ended.stdout + ended.stderr, ended.stderr
    assert len(state_of(tmp_path / "run")) == 1


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("how", "code"), [("fetch", 0), ("stop", 1)])
def test_the_other_answers_to_a_difference(how: str, code: int, tmp_path: Path) -> None:
    ended = run(tmp_path / "run", 3, [[8, 1, "parameter", 77, 5]], f"on_divergence={how}", "until=40")
    text = ended.stdout + ended.stderr
    assert ended.returncode == code and "the state of replica 1 differs from that of the others before step " in text, text
    assert ("it fetches theirs" in text) == (how == "fetch") and "goes on from" not in text, text
    assert len(state_of(tmp_path / "run")) == (how == "fetch"), text


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_served_run_goes_back_and_its_programs_join_again(tmp_path: Path) -> None:
    """torchrun starts them again."""
    flips = json.dumps([[8, 1, "parameter", 77, 5]])
    options = ("every=50", "until=120", "checkpoint=25")
    served, _ = run_under_torchrun(tmp_path, SCRIPT, tmp_path, "2", flips, *options, options=("--checkpoint-every", "25"))
    assert "the run goes on from its beginning, where its state was found equal; its programs are waited for" in served
    (path,) = {path.resolve() for path in tmp_path.glob("2*/*/report.json")}
    assert len({each["state_digest"] for each in json.loads(path.read_text())["replicas"]}) == 1
