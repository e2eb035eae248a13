"""Runs cells of the fault matrix: bring the ranks into the phase, inject the fault, collect the results.

In: a `Cell`, and the `RankProcesses` that start its processes; each cell has new ones. Out: its `Finding`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from helixrt.bench.fault_matrix import messages
from helixrt.bench.fault_matrix.cells import (
    RANKS,
    SURVIVORS,
    VICTIM,
    Answer,
    Cell,
    Consequence,
    Fault,
    Finding,
    Observed,
    Outcome,
    Phase,
    Refusals,
    judge,
)
from helixrt.bench.fault_matrix.processes import ALL, SECRET, TIMEOUT_S, WRONG_SECRET, NoAnswer, RankProcess, RankProcesses
from helixrt.lab.net import Cut


def run_cell(owner: RankProcesses, cell: Cell) -> Finding:
    """Raises ConfigError where a half-open cell has no namespaces, Fatal when not even the ranks start."""
    cell_run = _CellRun(owner, cell)
    try:
        cell_run.run()
    except NoAnswer as missing:
        cell_run.seen.after.append(missing.answer)
    finally:
        cell_run.end()
    return judge(cell_run.seen, TIMEOUT_S)


class _CellRun:
    """One cell's run."""

    def __init__(self, owner: RankProcesses, cell: Cell) -> None:
        self.seen = Observed(cell)
        self._owner, self._cell = owner, cell
        self._network = owner.network() if cell.fault is Fault.HALF_OPEN else None
        self._generation, self._step = 0, 0
        self._cut = self._stopped = False
        self._processes = owner.start(ALL, cell.transport, self._network)
        self._victim = self._processes[VICTIM]
        self._intruder: RankProcess | None = None
        if cell.fault in (Fault.SECRET, Fault.STALE):
            secret = WRONG_SECRET if cell.fault is Fault.SECRET else SECRET
            self._intruder = owner.start((RANKS,), cell.transport, None, secret)[0]

    @property
    def _harmless(self) -> bool:
        return self._cell.consequence is Consequence.NONE

    def run(self) -> None:
        if self._cell.phase is not Phase.CONNECTING:
            self._generation = 1
            self._fine(ALL, self._configure(ALL))
            self._sum(ALL)
        self._reach_the_phase()
        self._inject()
        self._collect_answers()
        self._recover()
        self._resume_victim()
        self._leave()

    # ---- calls of several ranks at once

    def _ask(self, ranks: Sequence[int], order: messages.ORDERS) -> dict[int, Answer]:
        for rank in ranks:
            self._processes[rank].send(order)
        return {rank: self._processes[rank].receive() for rank in ranks}

    def _fine(self, ranks: Sequence[int], order: messages.ORDERS) -> None:
        """Raises NoAnswer unless all answers are FINE."""
        for answer in self._ask(ranks, order).values():
            if answer.outcome is not Outcome.FINE:
                raise NoAnswer(Answer(answer.rank, answer.outcome, answer.end_s, f"{type(order).__name__}: {answer.said}"))

    def _configure(self, members: tuple[int, ...]) -> messages.Configure:
        return messages.Configure(self._generation, members, self._processes[0].ready.store)

    def _all_reduce(self, members: tuple[int, ...]) -> messages.AllReduce:
        self._step += 1
        return messages.AllReduce(self._step, members)

    def _sum(self, members: tuple[int, ...]) -> None:
        self._fine(members, self._all_reduce(members))

    # ---- the fault

    def _reach_the_phase(self) -> None:
        phase, fault = self._cell.phase, self._cell.fault
        if phase is Phase.IDLE:
            if not self._harmless and not self._cell.leaves_idle:
                for rank in SURVIVORS:
                    self._processes[rank].send(messages.Command.NOTICE)
            self._victim.send(messages.Inject(fault))
        else:
            self._victim.send(messages.Arm(fault, phase))
            if phase is Phase.SHUTTING_DOWN:
                self._victim.send(messages.Command.CLOSE)
            else:
                if phase in (Phase.CONNECTING, Phase.RECONFIGURING):
                    self._generation += 1
                collective = phase in (Phase.REDUCE_SCATTER, Phase.ALL_GATHER)
                order = self._all_reduce(ALL) if collective else self._configure(ALL)
                for process in self._processes:
                    process.send(order)
        word = self._victim.receive()
        assert word is messages.Command.HERE, word

    def _inject(self) -> None:
        fault, victim = self._cell.fault, self._victim
        if self._intruder is not None:
            generation = self._generation - (fault is Fault.STALE)
            targets = {process.rank: process.ready.address for process in self._processes}
            word = self._intruder.ask(messages.Attack(generation, targets))
            assert word is messages.Command.HERE, word
        if self._cell.phase is Phase.SHUTTING_DOWN:
            self._count()  # of endpoints that are about to close
            for rank in SURVIVORS:
                self._processes[rank].send(messages.Command.CLOSE)
        self.seen.fault_s = time.monotonic()
        if fault is Fault.KILL:
            os.kill(victim.pid, signal.SIGKILL)
        elif fault is Fault.STOP:
            os.kill(victim.pid, signal.SIGSTOP)
            self._stopped = True
        else:
            if fault is Fault.HALF_OPEN:
                assert self._network is not None
                self._network.cut(VICTIM, 0, Cut.PATH)
                self._cut = True
            self._now()

    def _now(self) -> None:
        word = self._victim.ask(messages.Command.NOW)
        assert isinstance(word, messages.Injected), word
        if self._cell.fault not in (Fault.STOP, Fault.HALF_OPEN):
            self.seen.fault_s = word.at_s

    def _collect_answers(self) -> None:
        seen, phase = self.seen, self._cell.phase
        if phase is not Phase.IDLE:
            for rank in ALL if self._harmless else SURVIVORS:
                seen.answers[rank] = self._processes[rank].receive()
        elif self._harmless:
            self.seen.after.append(self._victim.receive())  # to the order Inject
            seen.answers = self._ask(ALL, self._all_reduce(ALL))
        elif self._cell.leaves_idle:
            self._owner.exit_code(self._victim)
            self.seen.fault_s = time.monotonic()
            seen.answers = self._ask(SURVIVORS, self._all_reduce(ALL))
        else:
            for rank in SURVIVORS:
                answer = self._processes[rank].receive()
                if answer.outcome is Outcome.FINE:
                    seen.detected_s[rank] = answer.end_s
            seen.answers = self._ask(SURVIVORS, self._all_reduce(ALL))

    def _count(self) -> None:
        if self._intruder is not None:
            for rank in SURVIVORS:
                answer = self._processes[rank].ask(messages.Command.COUNT)
                assert isinstance(answer, Refusals), answer
                self.seen.refusals[rank] = answer

    # ---- and afterwards

    def _recover(self) -> None:
        """The next generation, without the faulty rank if it is faulty: exact sums."""
        members = ALL if self._harmless else SURVIVORS
        if self._cell.phase is Phase.SHUTTING_DOWN:
            for rank in members:
                ready = self._processes[rank].ask(messages.Command.OPEN)
                assert isinstance(ready, messages.Ready), ready
        else:
            self._count()
            if self._harmless:
                self._sum(members)
        self._generation += 1
        self._fine(members, self._configure(members))
        self._sum(members)
        self._sum(members)

    def _resume_victim(self) -> None:
        """A victim that still runs must report the loss, and must not disturb the others."""
        fault, phase, victim = self._cell.fault, self._cell.phase, self._victim
        if fault not in (Fault.STOP, Fault.HALF_OPEN, Fault.GARBAGE):
            return
        if self._stopped:
            os.kill(victim.pid, signal.SIGCONT)
            self._stopped = False
            self._now()
        if self._cut:
            assert self._network is not None
            self._network.restore(VICTIM, 0)
            self._cut = False
        if fault is Fault.GARBAGE and phase in (Phase.CONNECTING, Phase.RECONFIGURING):
            victim.send(messages.Command.NOW)  # end the garbage
        answer = victim.receive()
        if phase is Phase.IDLE:
            answer = victim.ask(self._all_reduce(ALL))
        self.seen.victim = answer
        self._sum(SURVIVORS)

    def _leave(self) -> None:
        leaving = [process for process in self._processes if process is not self._victim]
        if self._harmless or self.seen.victim is not None:
            leaving.append(self._victim)
        if self._intruder is not None:
            self.seen.after.append(self._intruder.ask(messages.Command.CEASE))
            leaving.append(self._intruder)
        for process in leaving:
            process.send(messages.Command.END)
        for process in leaving:
            self.seen.exit_codes[process.rank] = self._owner.exit_code(process)

    def end(self) -> None:
        if self._cut and self._network is not None:
            self._network.restore(VICTIM, 0)
        self._owner.end([*self._processes, *filter(None, [self._intruder])])
