"""FTAR's fault matrix on real processes: no rank hangs or crashes, no sum is wrong, the survivors continue.

`helixrt bench faults` measures how long survivors are blocked; here only that no time-out of their own ended it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helixrt.bench.fault_matrix.cell_run import run_cell
from helixrt.bench.fault_matrix.cells import (
    ALL_CELLS,
    SURVIVORS,
    TCP_CELLS,
    VICTIM,
    Answer,
    Cell,
    Fault,
    Observed,
    Outcome,
    Phase,
    Refusals,
    judge,
)
from helixrt.bench.fault_matrix.processes import RankProcesses

EVERY_TIME = (  # of each fault one cell, and every phase
    Cell(Fault.KILL, Phase.REDUCE_SCATTER),
    Cell(Fault.KILL, Phase.CONNECTING),
    Cell(Fault.STOP, Phase.ALL_GATHER),
    Cell(Fault.EXIT, Phase.ALL_GATHER),
    Cell(Fault.EXCEPTION, Phase.SHUTTING_DOWN),
    Cell(Fault.CLOSED, Phase.REDUCE_SCATTER),
    Cell(Fault.HALF_OPEN, Phase.IDLE),
    Cell(Fault.SLOW, Phase.RECONFIGURING),
    Cell(Fault.HELD, Phase.REDUCE_SCATTER),
    Cell(Fault.GARBAGE, Phase.REDUCE_SCATTER),
    Cell(Fault.SECRET, Phase.CONNECTING),
    Cell(Fault.STALE, Phase.ALL_GATHER),
    Cell(Fault.DISK, Phase.REDUCE_SCATTER),
    Cell(Fault.CLOCK, Phase.IDLE),
    Cell(Fault.KILL, Phase.REDUCE_SCATTER, "shared_memory"),
    Cell(Fault.STOP, Phase.CONNECTING, "shared_memory"),
    Cell(Fault.HELD, Phase.CONNECTING, "shared_memory"),
)


@pytest.fixture(scope="module")
def owner() -> Iterator[RankProcesses]:
    with RankProcesses() as made:
        yield made


def _parameters() -> Iterator[object]:
    for cell in ALL_CELLS:
        marks = [] if cell in EVERY_TIME else [pytest.mark.slow, pytest.mark.grid]
        if cell.fault is Fault.HALF_OPEN:
            marks.append(pytest.mark.netns)
        yield pytest.param(cell, id=str(cell).replace(", ", "-").replace(" ", "_"), marks=marks)


@pytest.mark.system
@pytest.mark.parametrize("cell", list(_parameters()))
def test_nobody_hangs_or_crashes_and_no_sum_is_wrong(owner: RankProcesses, cell: Cell) -> None:
    finding = run_cell(owner, cell)
    print(finding)
    assert not finding.problems, "\n".join(finding.problems)


def test_the_matrix_is_whole_and_every_fault_and_phase_runs_every_time() -> None:
    assert len(TCP_CELLS) == 13 * 6 and set(EVERY_TIME) <= set(ALL_CELLS)
    assert {cell.fault for cell in EVERY_TIME} == set(Fault) and {cell.phase for cell in EVERY_TIME} == set(Phase)


# ---------------------------------------------------------------- what `judge` must report


def _seen(cell: Cell, outcome: Outcome, blocked_s: float = 0.01) -> Observed:
    """Everything as it should be, if `outcome` is what the cell asks of survivors."""
    ranks = (0, 1, 2) if cell.fault is Fault.SLOW else SURVIVORS
    seen = Observed(cell, 100.0, {rank: Answer(rank, outcome, 100.0 + blocked_s) for rank in ranks})
    seen.exit_codes = dict.fromkeys(ranks, 0)
    return seen


def test_what_is_right_has_no_problems() -> None:
    killed, slow = Cell(Fault.KILL, Phase.ALL_GATHER), Cell(Fault.SLOW, Phase.ALL_GATHER)
    assert not judge(_seen(killed, Outcome.RETRYABLE), 10).problems
    assert judge(_seen(killed, Outcome.RETRYABLE), 10).unblocked_s == pytest.approx((0.01, 0.01))
    assert not judge(_seen(slow, Outcome.FINE), 10).problems
    assert judge(_seen(killed, Outcome.RETRYABLE, 0.3), 10).late(1.0)
    assert not judge(_seen(Cell(Fault.STOP, Phase.ALL_GATHER), Outcome.RETRYABLE, 1.4), 10).late(1.0)


@pytest.mark.parametrize("outcome", [Outcome.FINE, Outcome.WRONG, Outcome.CRASHED, Outcome.ENDED, Outcome.HUNG])
def test_survivors_of_a_death_may_only_raise_retryable(outcome: Outcome) -> None:
    assert judge(_seen(Cell(Fault.KILL, Phase.ALL_GATHER), outcome), 10).problems


@pytest.mark.parametrize("outcome", [Outcome.RETRYABLE, Outcome.WRONG, Outcome.CRASHED, Outcome.HUNG])
def test_what_is_no_failure_must_not_fail_also_for_the_victim(outcome: Outcome) -> None:
    cell = Cell(Fault.SLOW, Phase.ALL_GATHER)
    assert judge(_seen(cell, outcome), 10).problems
    seen = _seen(cell, Outcome.FINE)
    seen.answers[VICTIM] = Answer(VICTIM, outcome, 100.0)
    assert judge(seen, 10).problems


def test_the_judge_finds_every_problem() -> None:
    killed = Cell(Fault.KILL, Phase.ALL_GATHER)
    assert judge(_seen(killed, Outcome.RETRYABLE, 9.5), 10).problems  # its own time-out ended it
    seen = _seen(killed, Outcome.RETRYABLE)
    del seen.answers[2]
    assert judge(seen, 10).problems  # one that did not answer
    seen = _seen(killed, Outcome.RETRYABLE)
    seen.after.append(Answer(0, Outcome.WRONG))
    assert judge(seen, 10).problems  # a wrong sum in the next generation
    seen = _seen(killed, Outcome.RETRYABLE)
    seen.exit_codes[0] = -11
    assert judge(seen, 10).problems  # a survivor crashed at its end
    assert judge(_seen(Cell(Fault.KILL, Phase.IDLE), Outcome.RETRYABLE), 10).problems  # nobody noticed while idle
    seen = _seen(Cell(Fault.STOP, Phase.ALL_GATHER), Outcome.RETRYABLE)
    seen.victim = Answer(VICTIM, Outcome.FINE)
    assert judge(seen, 10).problems  # the stopped one came back and believes in its sum


@pytest.mark.parametrize("fault", [Fault.SECRET, Fault.STALE])
def test_an_intruder_that_was_never_refused_shows_nothing(fault: Fault) -> None:
    seen = _seen(Cell(fault, Phase.ALL_GATHER), Outcome.FINE)
    seen.refusals = {0: Refusals(0, 0)}
    assert judge(seen, 10).problems
    seen.refusals = {0: Refusals(1, 1)}
    assert not judge(seen, 10).problems
