"""Runs cells of the fault matrix: brings the ranks into the phase, lets the fault strike, hears what came of it.

In: a `Cell`, and the `Troupe` whose processes play it; each cell has fresh ones. Out: its `Finding`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from helixrt.bench.fault_matrix import cues
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
from helixrt.bench.fault_matrix.troupe import ALL, SECRET, TIMEOUT_S, WRONG_SECRET, Actor, Stuck, Troupe
from helixrt.lab.net import Cut


def run_cell(troupe: Troupe, cell: Cell) -> Finding:
    """Raises ConfigError where a half-open cell has no namespaces, Fatal when not even the ranks start."""
    play = _Play(troupe, cell)
    try:
        play.run()
    except Stuck as stuck:
        play.seen.after.append(stuck.answer)
    finally:
        play.end()
    return judge(play.seen, TIMEOUT_S)


class _Play:
    """One cell's run."""

    def __init__(self, troupe: Troupe, cell: Cell) -> None:
        self.seen = Observed(cell)
        self._troupe, self._cell = troupe, cell
        self._network = troupe.network() if cell.fault is Fault.HALF_OPEN else None
        self._generation, self._step = 0, 0
        self._cut = self._stopped = False
        self._actors = troupe.cast(ALL, cell.transport, self._network)
        self._victim = self._actors[VICTIM]
        self._intruder: Actor | None = None
        if cell.fault in (Fault.SECRET, Fault.STALE):
            secret = WRONG_SECRET if cell.fault is Fault.SECRET else SECRET
            self._intruder = troupe.cast((RANKS,), cell.transport, None, secret)[0]

    @property
    def _harmless(self) -> bool:
        return self._cell.consequence is Consequence.NONE

    def run(self) -> None:
        if self._cell.phase is not Phase.CONNECTING:
            self._generation = 1
            self._fine(ALL, self._configure(ALL))
            self._sum(ALL)
        self._bring_to_its_place()
        self._strike()
        self._hear_the_struck()
        self._recover()
        self._come_back()
        self._leave()

    # ---- calls of several ranks at once

    def _ask(self, ranks: Sequence[int], order: cues.ORDERS) -> dict[int, Answer]:
        for rank in ranks:
            self._actors[rank].tell(order)
        return {rank: self._actors[rank].hear() for rank in ranks}

    def _fine(self, ranks: Sequence[int], order: cues.ORDERS) -> None:
        """What must go well."""
        for answer in self._ask(ranks, order).values():
            if answer.outcome is not Outcome.FINE:
                raise Stuck(Answer(answer.rank, answer.outcome, answer.end_s, f"{type(order).__name__}: {answer.said}"))

    def _configure(self, members: tuple[int, ...]) -> cues.Configure:
        return cues.Configure(self._generation, members, self._actors[0].ready.store)

    def _all_reduce(self, members: tuple[int, ...]) -> cues.AllReduce:
        self._step += 1
        return cues.AllReduce(self._step, members)

    def _sum(self, members: tuple[int, ...]) -> None:
        self._fine(members, self._all_reduce(members))

    # ---- the fault

    def _bring_to_its_place(self) -> None:
        phase, fault = self._cell.phase, self._cell.fault
        if phase is Phase.IDLE:
            if not self._harmless and not self._cell.parts:
                for rank in SURVIVORS:
                    self._actors[rank].tell(cues.Word.NOTICE)
            self._victim.tell(cues.Strike(fault))
        else:
            self._victim.tell(cues.Arm(fault, phase))
            if phase is Phase.SHUTTING_DOWN:
                self._victim.tell(cues.Word.CLOSE)
            else:
                if phase in (Phase.CONNECTING, Phase.RECONFIGURING):
                    self._generation += 1
                collective = phase in (Phase.REDUCE_SCATTER, Phase.ALL_GATHER)
                order = self._all_reduce(ALL) if collective else self._configure(ALL)
                for actor in self._actors:
                    actor.tell(order)
        word = self._victim.hear()
        assert word is cues.Word.HERE, word

    def _strike(self) -> None:
        fault, victim = self._cell.fault, self._victim
        if self._intruder is not None:
            generation = self._generation - (fault is Fault.STALE)
            targets = {actor.rank: actor.ready.address for actor in self._actors}
            word = self._intruder.ask(cues.Attack(generation, targets))
            assert word is cues.Word.HERE, word
        if self._cell.phase is Phase.SHUTTING_DOWN:
            self._count()  # of endpoints that are about to close
            for rank in SURVIVORS:
                self._actors[rank].tell(cues.Word.CLOSE)
        self.seen.struck_s = time.monotonic()
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
        word = self._victim.ask(cues.Word.NOW)
        assert isinstance(word, cues.Struck), word
        if self._cell.fault not in (Fault.STOP, Fault.HALF_OPEN):
            self.seen.struck_s = word.at_s

    def _hear_the_struck(self) -> None:
        seen, phase = self.seen, self._cell.phase
        if phase is not Phase.IDLE:
            for rank in ALL if self._harmless else SURVIVORS:
                seen.struck[rank] = self._actors[rank].hear()
        elif self._harmless:
            self.seen.after.append(self._victim.hear())  # to the order to strike
            seen.struck = self._ask(ALL, self._all_reduce(ALL))
        elif self._cell.parts:
            self._troupe.exit_code(self._victim)
            self.seen.struck_s = time.monotonic()
            seen.struck = self._ask(SURVIVORS, self._all_reduce(ALL))
        else:
            for rank in SURVIVORS:
                answer = self._actors[rank].hear()
                if answer.outcome is Outcome.FINE:
                    seen.noticed_s[rank] = answer.end_s
            seen.struck = self._ask(SURVIVORS, self._all_reduce(ALL))

    def _count(self) -> None:
        if self._intruder is not None:
            for rank in SURVIVORS:
                answer = self._actors[rank].ask(cues.Word.COUNT)
                assert isinstance(answer, Refusals), answer
                self.seen.refusals[rank] = answer

    # ---- and afterwards

    def _recover(self) -> None:
        """The next generation, without the faulty rank if it is faulty: exact sums."""
        members = ALL if self._harmless else SURVIVORS
        if self._cell.phase is Phase.SHUTTING_DOWN:
            for rank in members:
                ready = self._actors[rank].ask(cues.Word.OPEN)
                assert isinstance(ready, cues.Ready), ready
        else:
            self._count()
            if self._harmless:
                self._sum(members)
        self._generation += 1
        self._fine(members, self._configure(members))
        self._sum(members)
        self._sum(members)

    def _come_back(self) -> None:
        """A victim that lives must learn that it is out, and must not harm the others."""
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
            victim.tell(cues.Word.NOW)  # enough of it
        answer = victim.hear()
        if phase is Phase.IDLE:
            answer = victim.ask(self._all_reduce(ALL))
        self.seen.victim = answer
        self._sum(SURVIVORS)

    def _leave(self) -> None:
        peaceful = [actor for actor in self._actors if actor is not self._victim]
        if self._harmless or self.seen.victim is not None:
            peaceful.append(self._victim)
        if self._intruder is not None:
            self.seen.after.append(self._intruder.ask(cues.Word.CEASE))
            peaceful.append(self._intruder)
        for actor in peaceful:
            actor.tell(cues.Word.END)
        for actor in peaceful:
            self.seen.exit_codes[actor.rank] = self._troupe.exit_code(actor)

    def end(self) -> None:
        if self._cut and self._network is not None:
            self._network.restore(VICTIM, 0)
        self._troupe.dismiss([*self._actors, *filter(None, [self._intruder])])
