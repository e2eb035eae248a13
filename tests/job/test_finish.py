"""The end of a replica's training: how long the last validation may take."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from helixrt.errors import Fatal
from helixrt.job.evaluation_orders import EvaluationOrders
from helixrt.job.finish import EndOfRun, ObservedMembership
from helixrt.job.leader_reports import Finished
from helixrt.protocol.step.lineage import genesis
from helixrt.replica.commands import Digest, Digested, RankCommand
from helixrt.replica.progress import Progress
from helixrt.replica.run_keys import done_key
from helixrt.replica.store import MemoryRunStore

LIMIT_S = 0.2


def ended(asked_s: float, takes_s: float) -> Finished | None:
    """What a replica says that has been through its last step, and whose user's validation takes so long, having asked for
    `asked_s`."""
    store, progress, digests = MemoryRunStore(), Progress(), dict[int, Digested]()
    over = threading.Event()
    threads: list[threading.Thread] = []

    def main_thread() -> None:
        with progress.busy("validation", asked_s):
            over.wait(takes_s)
        digests[0] = Digested("p", "s")

    def tell(command: RankCommand) -> None:
        if isinstance(command, Digest):
            threads.append(threading.Thread(target=main_thread))
            threads[0].start()
            while not progress.slots:
                pass

    record = genesis("run", 1)
    machine: Any = SimpleNamespace(settled=True, held=record.hash, held_step=0, log=SimpleNamespace(get=lambda lineage: record))
    orders: Any = SimpleNamespace(last_is_safe=lambda record, holders: "")
    membership: Any = SimpleNamespace(alone=True)
    evaluations = EvaluationOrders(0, every=0, shared=False, last_step=0)
    end = EndOfRun(0, 1, store, ObservedMembership(membership), orders, digests, tell, evaluations, (0,), LIMIT_S, progress)
    try:
        assert not end.resting(machine)
    finally:
        over.set()
        threads[0].join()
    text = store.get(done_key(0))
    return None if text is None else Finished.from_json(text)


def test_a_validation_may_take_as_long_as_the_program_has_asked_for() -> None:
    found = ended(asked_s=60.0, takes_s=4 * LIMIT_S)
    assert found is not None and found.step == 0


def test_a_validation_that_asks_for_nothing_has_a_limit() -> None:
    with pytest.raises(Fatal, match="took longer than 0.2 s; within `with session.busy"):
        ended(asked_s=0.0, takes_s=600.0)
