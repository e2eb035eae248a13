"""The leading rank of a replica: when it begins, and what it says and reports while it waits or reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from helixrt.errors import Retryable
from helixrt.job.checkpoint import Checkpoint
from helixrt.job.config import JobConfig
from helixrt.job.controller import Happening
from helixrt.job.leading import Leading, await_the_others
from helixrt.protocol.step.lineage import genesis
from helixrt.replica.contracts import RunStore
from helixrt.replica.progress import Progress
from helixrt.replica.store import MemoryRunStore
from helixrt.timeouts import derive
from tests.job.test_controller import World

DEADLINE_S = 60.0


def leading_of(store: RunStore, replica: int = 0, incarnation: int = 0, launcher: str = "local") -> Leading:
    """One of two replicas, without a worker and a leader."""
    leading = object.__new__(Leading)
    config = JobConfig(launcher=launcher)
    leading._context = SimpleNamespace(  # type: ignore[assignment]
        store=store,
        replica=replica,
        spec=SimpleNamespace(incarnation=incarnation),
        config=config,
        timeouts=derive(config.step_timeout_s),
        progress=Progress(),
    )
    leading._reports, leading._adapter = [], None
    leading._said_silent, leading._said_read = False, ""
    leading._membership = SimpleNamespace(announce=lambda: None)  # type: ignore[assignment]
    machine = SimpleNamespace(held="a commit", log=SimpleNamespace(genesis="genesis"))
    leading._leader = SimpleNamespace(start=lambda: None, machine=machine)  # type: ignore[assignment]
    return leading


def test_a_replica_that_died_in_its_first_start_is_waited_for_no_longer_than_its_second_takes() -> None:
    store = MemoryRunStore()
    waiting = threading.Thread(target=await_the_others, args=(store, 0, 2, 600.0), daemon=True)
    waiting.start()
    leading_of(store, 1, incarnation=1).begin()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


class Asked(MemoryRunStore):
    """Waits no second, and keeps for how long it was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.limits_s: list[float] = []

    def wait(self, key: str, timeout_s: float) -> str:
        self.limits_s.append(timeout_s)
        return "yes"


@pytest.mark.parametrize("launcher", ["local", "ray", "environment", "module:name"])
def test_replicas_wait_for_each_other_for_half_of_their_start_timeout(launcher: str) -> None:
    """The rest is for the start of the process and for the quorum: they wait no longer than the driver does for them."""
    store = Asked()
    leading_of(store, launcher=launcher).begin()
    assert store.limits_s and 0 < max(store.limits_s) <= derive(JobConfig().step_timeout_s).start_s / 2


def test_the_death_of_a_replica_in_its_first_start_costs_no_other_replica_a_restart() -> None:
    world, ready = World(start_timeout_s=3.0), MemoryRunStore()
    ready.put_if_absent("ready/0", "yes")

    def round_() -> None:
        if ("r1.pp0.dp0.cp0.tp0", 1) in world.launcher.starts and ready.get("ready/1") is None:
            leading_of(ready, 1, incarnation=1).begin()
        if ready.get("ready/1") is not None:
            world.running(0)
            world.running(1, 1)

    outcome = world.run(
        *[None] * 10,
        lambda: world.launcher.end(1, 0, -9, "killed by the kernel"),
        *[round_] * 40,
        lambda: (world.finish(0), world.finish(1)),
        None,
        world.exit_all,
    )
    assert outcome.ok and [e.replica for e in world.controller.history if e.kind is Happening.LOST] == [1]


def test_a_replica_that_waits_for_a_silent_storage_says_so_once() -> None:
    said: list[str] = []

    def silent(newer_than: int, reads: object) -> str:
        raise Retryable("s3://bucket/run does not answer: timed out")

    leading = leading_of(MemoryRunStore())
    parts = SimpleNamespace(durable=SimpleNamespace(newest=silent), genesis=None, metrics=SimpleNamespace(say=said.append))
    leading._parts = parts  # type: ignore[assignment]
    for _ in range(3):
        with pytest.raises(Retryable):
            leading._newest_durable(-1)
    assert said == ["the replica waits until it can read the run's checkpoints: s3://bucket/run does not answer: timed out"]


def test_a_replica_that_reads_a_checkpoint_asks_for_the_time_and_says_how_much_it_reads() -> None:
    said: list[str] = []
    leading = leading_of(MemoryRunStore())
    asked: list[float] = []

    def newest(newer_than: int, reads: Callable[[Checkpoint], None]) -> str:
        for name, size in (("step_2", 5_000), ("step_4", 120_000_000_000), ("step_4", 120_000_000_000)):
            reads(Checkpoint(Path(name), genesis("run", 2), {"pp": 1}, size))
        asked.extend(thread.limit_s for thread in leading._context.progress.report().threads)
        return "hash"

    log = SimpleNamespace(genesis="another hash")
    leading._leader = SimpleNamespace(machine=SimpleNamespace(log=log))  # type: ignore[assignment]
    parts = SimpleNamespace(durable=SimpleNamespace(newest=newest), genesis=None, metrics=SimpleNamespace(say=said.append))
    leading._parts = parts  # type: ignore[assignment]
    assert leading._newest_durable(-1) == "hash" and asked == [leading._context.config.checkpoint.write_s]
    assert leading._context.progress.report().threads == ()
    assert said == ["the replica reads the checkpoint step_4, 120 GB"], "small ones are not worth a line"
