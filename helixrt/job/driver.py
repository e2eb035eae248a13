"""The driver: one process that owns a run, from the checked settings to the report.

In: a `JobConfig` and what its ranks run (`JobProgram`). Out: an exit code and the run's folder. It hosts the run's store and
the membership service, starts the ranks through a launcher (local processes, or Ray actors when it is the
entrypoint of a Ray job), prints what the leaders report, and writes the report at the end. It takes
no part in training: steps go on while it is slow, and what must survive it is written by the ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError, HelixError, Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job.background import Background
from helixrt.job.chaos import driver_is_due
from helixrt.job.compaction import Compaction
from helixrt.job.config import RESUME, ChaosConfig, JobConfig
from helixrt.job.controller import LOOK_S, Controller, Happening, LifeEvent
from helixrt.job.description import Description
from helixrt.job.divergence import Divergence, said
from helixrt.job.draining import DrainAsked, DrainRequests
from helixrt.job.effects import without_effect
from helixrt.job.keeper import LOCK_FILE
from helixrt.job.keeper_start import kept_run
from helixrt.job.kept_run import Standing, absence_of, way_on
from helixrt.job.leader_reports import Finished
from helixrt.job.lineage_files import drop_from, read_log, with_history, write_durably
from helixrt.job.lives import Lives
from helixrt.job.loggers import MetricsLogger
from helixrt.job.loss_acceptance import take_acceptance
from helixrt.job.metrics import Logged, MetricsLine, Notice, StepMetrics, ValidationPart
from helixrt.job.output import RunOutput, new_run_folder, point_latest_to
from helixrt.job.place_owner import check_owner, take
from helixrt.job.places import coordinates, group_world_size
from helixrt.job.policies import Options, StopRun
from helixrt.job.ray_run import Reserved, stop_s
from helixrt.job.report import RunFacts, write_report
from helixrt.job.resume import keep_accumulation, keep_stream, restore_accumulation, restore_stream
from helixrt.job.run_lock import RunLock, lock_on
from helixrt.job.services import ServedHere, Services
from helixrt.job.shared_validation import SharedValidations
from helixrt.job.storage_trouble import in_words
from helixrt.job.stored_path import Place, check_writable, place_in, place_of
from helixrt.protocol.step.lineage import CommitRecord, Log, audit, genesis
from helixrt.replica.contracts import Launcher, RankSpec, RunStore
from helixrt.replica.run_keys import PLAN_KEY, accepted_key, done_key
from helixrt.replica.runlog import RunLog
from helixrt.replica.store_client import run_store
from helixrt.timeouts import derive


@dataclass(frozen=True)
class JobProgram:
    """What the ranks of a job run, and how console and report describe it.

    `module` is started with `python -m` as a rank's process, which reads its spec from standard input; Ray actors call its
    `run_rank(spec)`.
    """

    module: str
    description: Description = Description()
    exit_grace_s: float = 600.0  # a rank that has not left so long after the run's end is killed
    reserved: Reserved = Reserved()  # by each Ray actor
    loggers: tuple[MetricsLogger, ...] = ()  # besides those that are built in


@dataclass(frozen=True)
class Run:
    """A run's folder and identity; `log`: its log so far (the genesis alone for a new run), which the driver goes on with."""

    folder: Path
    name: str
    epoch_s: float
    log: Log
    life: int = 0  # how often it was resumed
    agreed: int = -1  # the life whose streams agreed on what those of this one must agree on; -1: on nothing so far
    lock: RunLock | None = None  # of the folder, held until the run's end
    checkpoints: str = ""  # where they are; "": in the folder
    owner: str = ""  # the token by which they are this life's, where they are elsewhere (`place_owner`)


def new_run(config: JobConfig) -> Run:
    """Make the run's folder, with its settings and identity in it. Raises ConfigError (storage, checkpoint.path) for a storage
    that cannot be written."""
    name = f"{config.name}-{secrets.token_hex(4)}"
    place = None
    if config.checkpoint.path and config.checkpoint.every:
        place = place_in(config.checkpoint.path, name)
        check_writable("checkpoint.path", place)
    try:
        folder = new_run_folder(Path(config.output.root))
        lock, log = RunLock(folder, name, 0), Log([genesis(name, config.mesh.replicas)])
        owner = "" if place is None else _taken(place, name, folder)
        run = Run(folder, name, time.time(), log, lock=lock, checkpoints=str(place or ""), owner=owner)
        write_durably(folder / "config.json", json.dumps(config.to_plain(), indent=1))
        _write_identity(run, config.mesh.replicas)
    except OSError as error:
        raise ConfigError("storage", config.output.root, f"cannot be written: {in_words(error)}") from error
    return run


def _write_identity(run: Run, replicas: int) -> None:
    identity = {"run": run.name, "epoch_s": run.epoch_s, "life": run.life, "checkpoints": run.checkpoints}
    identity |= {"replicas": replicas} | ({"owner": run.owner} if run.owner else {})
    write_durably(run.folder / "run.json", json.dumps(identity))


def reopened_run(folder: Path, checkpoint: checkpoints.Checkpoint | None, replicas: int, dealt: bool = False) -> Run:
    """A new life of the run in this folder, from one of its checkpoints, or (None) from its initial values. `dealt`: its data
    is dealt over other streams.

    Nothing is changed before the folder is locked and the checkpoint is known to be there still. Raises ConfigError (resume).
    """
    identity = json.loads((folder / "run.json").read_text(encoding="utf-8")) | {"replicas": replicas}
    lock = RunLock(folder, identity["run"], identity["life"] + 1)
    try:
        return _reopened(folder, checkpoint, dealt, identity, lock)
    except BaseException:
        lock.close()
        raise


def _reopened(
    folder: Path, checkpoint: checkpoints.Checkpoint | None, dealt: bool, identity: dict[str, Any], lock: RunLock
) -> Run:
    """See `reopened_run`; the folder is locked."""
    kept = kept_run(folder)
    if kept is not None and lock_on(folder / LOCK_FILE):
        rule = f"its ranks may be alive: its keeper ({kept.where}) has not ended, and does not answer here"
        raise ConfigError("resume", folder, f"{rule}; attach to it with `helixrt attach` where it is, or end it first")
    if checkpoint is not None and not checkpoints.is_complete(checkpoint.folder):
        raise ConfigError("resume", folder, f"its checkpoint {checkpoint.folder.name} was deleted meanwhile; resume again")
    log = read_log(folder / "lineage")
    if checkpoint is None and log.behind.begin:
        raise ConfigError("resume", folder, "it has no checkpoint to go on from, and its lineage no longer begins with step 0")
    if checkpoint is not None and log.get(checkpoint.record.hash) is None:
        rule = f"the lineage in {folder / 'lineage'} does not know the checkpoint {checkpoint.folder}"
        raise ConfigError("resume", "true", rule)
    place = identity.get("checkpoints", "")
    if place:
        check_owner(place_of(place), identity["run"], folder)
    drop_from(folder / "lineage", len(log))
    # Generations must go on upwards, also where this machine's clock is behind the one that gave the last.
    epoch_s = min(identity["epoch_s"], time.time() - log.head.generation / 1e6 - 1.0)
    life = 1 + max(identity["life"], *(entry.life for entry in log.entries))
    agreed = -1 if dealt else 0 if checkpoint is None else checkpoint.record.life
    owner = _taken(place_of(place), identity["run"], folder) if place else ""
    run = Run(folder, identity["run"], epoch_s, log, life, agreed, lock, place, owner)
    _write_identity(run, identity["replicas"])  # before any rank starts: lives of a run are never numbered alike
    if (folder.parent.parent / "latest").is_symlink():  # else the folder was moved
        point_latest_to(folder)
    return run


def _taken(place: Place, name: str, folder: Path) -> str:
    """The token with which the run in this folder has the place. Raises ConfigError (checkpoint.path) if it cannot be
    written."""
    try:
        return take(place, name, folder)
    except OSError as error:
        raise ConfigError("checkpoint.path", place, f"cannot be written: {in_words(error)}") from error


_REPORT_S = 1.5  # of the time that a launcher gives a driver to end


class Driver:
    """Owns the services of one run and everything started for it. `services`: of a run with a keeper; `standing`: where that
    run stands, if this driver attaches to it."""

    def __init__(
        self,
        config: JobConfig,
        run: Run,
        program: JobProgram,
        secret: str = "",
        services: Services | None = None,
        standing: Standing | None = None,
    ) -> None:
        if config.resume:
            slowed = ChaosConfig(link=config.chaos.link, slow=config.chaos.slow)
            config = replace(config, chaos=slowed)  # faults belong to a run's first life; what is slow stays slow
        self.config, self.run_, self.program = config, run, program
        self.timeouts = derive(config.step_timeout_s, config.heartbeat_s)
        self.secret = secret or secrets.token_hex(32)
        self._services = services or ServedHere(config, run.folder, program.module, program.reserved)
        self._kept, self._standing = services is not None, standing
        self.address = self._services.address
        self.store: RunStore = run_store(self.address, self._services.durable, self.secret)
        self.log = RunLog(self.store)
        self.seen = run.log
        self.reached = self.seen.head
        """The record whose state the replicas have ended with, once the run has ended."""
        self._compaction = Compaction(self.log, run.folder, config.mesh.replicas)
        if standing is None:
            self._compaction.restore(self.seen)
        self.output = RunOutput(
            run.folder,
            config.mesh.replicas,
            name=run.name,
            settings=config.to_plain(),
            loggers=program.loggers,
            flops_per_step=program.description.flops_per_step,
            peak_flops=config.output.peak_tflops * 1e12 * group_world_size(config.mesh),
        )
        self._validations = SharedValidations()
        self._plan: dict[str, int] | None = None  # how far the loops go, once a rank has said so
        self._requests = DrainRequests(run.folder, config.mesh.replicas)
        self._asked: list[DrainAsked] = []  # by the user, and not carried out yet
        self._accepts = False  # a loss, likewise
        self._acceptance = Background[bool]()
        self._stream_kept = run.agreed >= 0 and restore_stream(self.store, run.folder, run.agreed, run.life)
        self._accumulation_kept = False
        if run.agreed >= 0:
            restore_accumulation(self.store, run.folder)
        self._lives = Lives(self.store, config.mesh, kept=services is not None)
        self.failure = ""
        """Why the run failed, once it has ended so."""
        self.diverged: Divergence | None = None
        """How replicas were found to differ, once the run has ended by it."""

    def specs(self, replica: int, incarnation: int) -> list[RankSpec]:
        """What the ranks of one life of a replica are told."""
        self._lives.begin(replica, incarnation, before=self._standing is not None)
        return [
            RankSpec(
                run=self.run_.name,
                coordinate=coordinate,
                incarnation=incarnation,
                store=self.address,
                lighthouse=self._services.lighthouse,
                output=str(self.run_.folder),
                secret=self.secret,
                run_epoch_s=self.run_.epoch_s,
                config=self.config.to_plain(),
                transport="ray" if self.config.launcher == "ray" else "http",
                life=self.run_.life,
                durable=self._services.durable,
            )
            for coordinate in coordinates(self.config.mesh, replica)
        ]

    def launcher(self) -> Launcher:
        return self._services.launcher()

    def end_store(self) -> None:
        """After `run`, where another life of the run begins in this process."""
        self._services.end_store()

    # ---------------------------------------------------------------- the run

    def run(self) -> int:
        """Train to the end; 0 when the replicas ended equal and every batch entered once."""
        options = Options(
            replicas=self.config.mesh.replicas,
            ranks_per_replica=group_world_size(self.config.mesh),
            max_restarts=self.config.restarts,
            fatal_restarts=self.config.fatal_restarts,
            on_poison=self.config.on_poison,
            start_timeout_s=self.timeouts.start_s,
            save_s=self.config.checkpoint.write_s if self.config.checkpoint.every else 0.0,
        )
        ours = self._standing is None  # a run that this driver cannot attach to is left as it is
        for line in without_effect(self.config) if ours else ():
            self.output.say(line)
        try:
            self.controller = Controller(
                self.launcher(),
                self.store,
                self.specs,
                options,
                self._lived,
                self.program.exit_grace_s,
                timeouts=self.timeouts,
                signal_grace_s=min(self.config.signal_grace_s, stop_s() - _REPORT_S),
            )
            if self._standing is not None:
                self._attach(self._standing)
            ours = True
            stopped = self.controller.run(tick=self._tick, look_s=LOOK_S)
            self._tick()
            return self._end(stopped)
        except Retryable as lost:
            begun = ours and hasattr(self, "controller")  # else the launcher could not be made
            if begun and self._kept and self.controller.state.stopped is None:
                ours = False  # the keeper, if it lives, waits for another driver
                goes_on, how = way_on(self.run_.folder)
                begun = not goes_on  # else that driver writes the report
                lost.add_note(how)
                self.output.say(f"{lost}; {how}")
            if begun:
                self._report((), self._advance())
            raise
        except BaseException:
            if ours and hasattr(self, "controller"):
                self._interrupted()
                ours = not self.controller.lets_leave
            raise
        finally:
            self.output.close()
            self._compaction.close()
            if self.run_.lock is not None:
                self.run_.lock.close()
            if ours:
                self._services.close()
            else:
                self._services.leave()

    def _attach(self, standing: Standing) -> None:
        """Say what happened without a driver, and go on from there."""
        absence = absence_of(self.store, self.seen.head.step, time.time())
        told = absence.told(bool(standing.alive))
        self.output.say(f"attached to run {self.run_.name}: {told}")
        self.output.attached(absence, [entry for entry in self.seen.entries if entry.step > absence.first])
        self.controller.take_over(standing.state, standing.alive, told)

    def _interrupted(self) -> None:
        """After a signal or an error: say from where the run can go on, and, unless it ends at once, write the report."""
        with suppress(Exception):  # the first error is more useful
            if self.controller.asked_by and not self.controller.at_once:
                self._tick()
            how = f"by {self.controller.asked_by}" if self.controller.asked_by else "early"
            later = "; replicas that have not left yet may save a later one" if self.controller.lets_leave else ""
            self.output.say(f"the run was ended {how} after step {self.seen.head.step}; {self._saved()}{later}")
            if not self.controller.at_once:
                self._report(self._finished(), self._advance())

    def _saved(self) -> str:
        """From where the run can go on. Raises Retryable where the storage does not answer."""
        saved = checkpoints.checkpoint_of(self.run_.folder)
        return "it has no checkpoint" if saved is None else f"its newest checkpoint is of step {saved.record.step}"

    def _lived(self, event: LifeEvent) -> None:
        if event.kind is Happening.LEAVING:
            self.output.say(event.why)
            return
        self.output.life(event)
        if event.kind is Happening.RUNNING:
            self._lives.runs(event.replica, event.incarnation)

    def _tick(self) -> None:
        """Print what the leaders have reported since the last time; die if chaos says so."""
        if self._plan is None and (plan := self.store.get(PLAN_KEY)) is not None:
            self._plan = json.loads(plan)
            self.output.plan(self._plan["until"])
        if not self._accumulation_kept and self._plan is not None:
            self._accumulation_kept = keep_accumulation(self.run_.folder, self._plan["accumulate"])
        for line in self._lives.news():
            self._show(line)
        self.output.tick()
        if not self._stream_kept:
            mesh = self.config.mesh
            self._stream_kept = keep_stream(self.store, self.run_.folder, mesh.replicas, self.run_.life, mesh.dp_shard)
        self._asked += self._requests.take()
        while self._asked:  # what the store does not take now is tried again
            self.controller.drain(self._asked[0])
            del self._asked[0]
        self._accepts = self._accepts or bool(self._acceptance.ask("", lambda: take_acceptance(self.run_.folder)))
        if self._accepts:
            self.store.put_if_absent(accepted_key(self.seen.head.hash), "yes")
            self._accepts = False
            step = self.seen.head.step
            self.output.say(f"the loss of step {step}, and of those before it that only missing replicas hold, is accepted")
        new = self.log.read_from(len(self.seen))
        for entry in new:
            self.seen.append(entry)
            if driver_is_due(self.config.chaos, entry.step):
                os.kill(os.getpid(), signal.SIGKILL)
        self.controller.committed({life for entry in new for life in entry.contributors})
        self.output.committed(new)
        for joined in self._validations.due(self.seen, time.monotonic()):
            self._show(joined)
        self._compaction.look(self.seen, self._advance())
        self._lives.tidy()

    def _show(self, line: MetricsLine) -> None:
        figures = self.program.description.figures
        if isinstance(line, Logged) and figures is not None:
            line = figures.of(line)
        if isinstance(line, StepMetrics) or (isinstance(line, Logged) and line.what == Logged.STEP):
            self.output.step(line)
        elif isinstance(line, ValidationPart):
            self._validations.add(line)
        elif isinstance(line, Logged):
            self.output.evaluated(line)
        elif isinstance(line, Notice):
            self.output.say(f"{line.rank}  {line.text}")
        else:
            self.output.validation(line)

    def _finished(self) -> list[Finished]:
        """What the replicas that are done have said."""
        said = [self.store.get(done_key(replica)) for replica in range(self.config.mesh.replicas)]
        return [Finished.from_json(text) for text in said if text is not None]

    def _reached(self, finished: Sequence[Finished]) -> CommitRecord:
        """The record whose state the replicas end with: the newest one; of a life that had no step to make, the one that it
        began with, behind which an earlier life may have left others."""
        if finished and not any(entry.life == self.run_.life for entry in self.seen.entries):
            held = self.seen.get(finished[0].lineage)
            if held is not None and self.seen.on_chain(held.hash):
                return held
        return self.seen.head

    def _advance(self) -> int:
        """Batches of a stream that a step takes."""
        return 1 if self._plan is None else self._plan["accumulate"]

    def _end(self, stopped: StopRun) -> int:
        finished, advance = self._finished(), self._advance()
        found = audit(self.seen.chain(), advance, self.seen.behind.audit)
        equal = len({(f.lineage, f.parameters, f.state) for f in finished}) == 1
        self.reached = self._reached(finished)
        at_head = all(f.lineage == self.reached.hash for f in finished)
        self._report(finished, advance)
        self.diverged = None if stopped.ok else said(self.store)
        if self.diverged is not None:
            ends = self.config.checks.on_divergence != RESUME  # else `way_back` decides
            self.failure = f"the run failed: {self.diverged.text}" if ends else self.diverged.text
        elif not stopped.ok:
            self.failure = f"the run failed: {stopped.reason}"
        elif finished and all(f.unsaved for f in finished):
            lost = f"the weights of step {finished[0].step} are lost: their checkpoint could not be written"
            self.failure = f"{lost} ({finished[0].unsaved})"
        elif not (equal and at_head and found.clean):
            self.failure = f"the replicas did not end alike: {finished}, audit {found}"
        if self.failure:
            self.output.complain(self.failure)
        if not stopped.ok and self.seen.head.step > 0:
            with suppress(HelixError):
                self.output.say(f"the run ended after step {self.seen.head.step}; {self._saved()}")
        return 1 if self.failure else 0

    def _report(self, finished: Sequence[Finished], advance: int) -> None:
        """Write the report and say what it holds. A run is as good without it: what goes wrong costs a message."""
        for joined in self._validations.rest(self.seen):
            self._show(joined)
        self.output.settle()
        try:
            whole = with_history(self.seen, self.run_.folder / "lineage")
            facts = RunFacts(
                config=self.config,
                description=self.program.description,
                entries=tuple(whole.entries),
                behind=whole.behind,
                finished=tuple(finished),
                history=tuple(self.controller.history),
                advance=advance,
                **self.output.figures(),
            )
            write_report(self.run_.folder, facts, self.output.say)
            self.output.summary()
        except Exception as error:  # a full disk, a read-only folder, an error in a chart
            self.output.problem("the report", error)
