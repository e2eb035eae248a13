"""Writing checkpoints: by one replica, in the background, each complete or ignored.

In: the state of a step's boundary and its commit record. Out: a folder as `helixrt.job.checkpoint` describes it.
Each rank of the writing replica writes its part from a snapshot, with the checksum of its own file, and says so through the
run's store; when all have, rank 0 writes DCP's metadata over all parts, and the manifest. `checkpoint_files` puts them into
place.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from helixrt.errors import Fatal, Retryable
from helixrt.job.checkpoint import LAYOUT, attempt_folder, complete_of, is_due, prune
from helixrt.job.checkpoint_files import delete_unfinished, join_parts, write_folder, write_manifest
from helixrt.job.checkpoint_layout import RankPart
from helixrt.job.storage_trouble import StorageTrouble
from helixrt.job.stored_path import Place, StoredPath, delete_all
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord, Kind
from helixrt.replica.contracts import RunStore

_WRITTEN, _BUSY, _FAILED = "written", "busy", "failed: "
_LOOK_S = 1.0  # between two looks whether the checkpointer was closed
_PAUSE_S = 0.2  # before an unanswered store is asked again


def kept_key(record: CommitRecord) -> str:
    """Put by rank 0 of whoever wrote the run's last checkpoint, when it is complete and synced."""
    return f"checkpoint/{record.hash}/complete"


@dataclass(frozen=True)
class _Job:
    record: CommitRecord
    part: RankPart | None  # None: this rank was still busy, the checkpoint is given up
    flush_lineage: Callable[[], object]
    after_failover: bool
    attempt: int  # number of the attempts at this record before; equal on all ranks, which see the same orders


class Checkpointer:
    """One rank's side of writing checkpoints. `folder` is where the run's are, `mesh` has the sizes of the replica's axes,
    `life` names this incarnation of the replica and `run_life` numbers that of the run, `last_step` is the run's last;
    `may_delete` is asked before old ones are deleted. `is_settled` tells whether no other record can supersede one that was
    saved; until then it does not count among the `keep` that stay.

    `maybe_save` never waits for the disk: at most one checkpoint is being written and the next one
    is given up by all ranks if one of them is not done with it, but for the run's last and that of a departure, which wait
    their turn. What goes wrong while writing never stops training: on rank 0, which knows of it, `trouble` has it until one
    succeeds.
    A rank that has not written its part after `write_s` counts as failed.
    """

    def __init__(
        self,
        folder: Place,
        rank: int,
        mesh: Mapping[str, int],
        store: RunStore,
        record: FlightRecord,
        every: int,
        keep: int,
        last_step: int,
        write_s: float = 3600.0,
        life: str = "",
        say: Callable[[str], None] = lambda text: None,
        run_life: int = 0,
        may_delete: Callable[[], bool] = lambda: True,
        is_settled: Callable[[CommitRecord], bool] = lambda record: True,
    ) -> None:
        self.trouble = StorageTrouble("checkpoint", record, say)
        self._folder, self._rank, self._mesh, self._life = folder, rank, dict(mesh), life
        self._run_life, self._may_delete, self._is_settled = run_life, may_delete, is_settled
        self.newest_step = 0  # of those that this rank has completed
        self._may_be_complete = False  # the newest attempt: its manifest may have been written
        self._ranks = prod(mesh.values())
        self._store, self._record = store, record
        self._every, self._keep, self._last_step, self._write_s = every, keep, last_step, write_s
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._changed = threading.Condition()  # guards the three below
        self._unfinished = 0
        self._newest = ("", 0)  # the record that was begun last, and how often
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def maybe_save(
        self,
        commit_record: CommitRecord,
        read_part: Callable[[], RankPart],
        me_writes: bool,
        flush_lineage: Callable[[], object],
    ) -> bool:
        """Begin a checkpoint of the state, if this step is due and this replica writes it (`writer_of`).

        `read_part` copies the state, or queues the copies; it is called in that case only, before this returns.
        `flush_lineage` must make the lineage durable up to the record; rank 0 calls it, on the background thread. Returns
        whether one was begun.
        """
        due = is_due(commit_record.step, self._every, self._last_step) and me_writes
        return due and self.save(commit_record, read_part, flush_lineage, after_failover=False)

    def save(
        self,
        commit_record: CommitRecord,
        read_part: Callable[[], RankPart],
        flush_lineage: Callable[[], object],
        after_failover: bool,
        departs: bool = False,
    ) -> bool:
        """As `maybe_save`, out of turn. All ranks of the replica that writes must be told to, in the same order. `departs`: no
        other checkpoint will have this state, so it waits its turn."""
        if self._closed.is_set():
            return False
        with self._changed:
            busy = self._unfinished > 0 and not (departs or self._ends(commit_record))
            self._unfinished += 1
            attempt = self._newest[1] if self._newest[0] == commit_record.hash else 0
            self._newest = (commit_record.hash, attempt + 1)
        snapshot = None if busy else read_part()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpointer", daemon=True)
            self._thread.start()
        self._jobs.put(_Job(commit_record, snapshot, flush_lineage, after_failover, attempt))
        return not busy

    @property
    def busy(self) -> bool:
        """One is being written."""
        return self._unfinished > 0

    def attempts(self, commit_record: CommitRecord) -> int:
        """How many attempts at this record's checkpoint were begun, if none of another was begun since."""
        newest, number = self._newest
        return number if newest == commit_record.hash else 0

    def wait(self, timeout_s: float = 300.0) -> None:
        """Return once nothing is being written. Raises Retryable when it takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._unfinished:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and self._unfinished:
                    raise Retryable(f"a checkpoint was not written after {timeout_s} s")

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what is being written, for at most `timeout_s`, and end the thread; idempotent.

        A run does not depend on it: its replicas are not done before its last checkpoint is complete.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout=timeout_s)
        self._closed.set()

    # ---------------------------------------------------------------- the background thread

    def _run(self) -> None:
        from torch.distributed.checkpoint.api import CheckpointException  # no Exception: DCP raises it for what failed

        while (job := self._jobs.get()) is not None:
            try:
                self._save(job)
            except (Exception, CheckpointException) as error:
                if self._rank == 0:
                    self._failed(job, _first_cause(error))
            finally:
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()

    def _failed(self, job: _Job, why: str) -> None:
        if isinstance(self._folder, StoredPath) and not self._may_be_complete:
            delete_all(self._target(job))
        try:
            if complete_of(self._folder, job.record) is not None:
                return  # by another replica, or by an earlier attempt
        except OSError:
            pass  # the storage does not answer
        self.trouble.failed(job.record.step, why)

    def _target(self, job: _Job) -> Place:
        attempt = f"{self._run_life}-{self._life.replace('/', '-')}-{job.attempt}"
        return attempt_folder(self._folder, job.record, attempt)

    def _save(self, job: _Job) -> None:
        target, self._may_be_complete = self._target(job), False
        verdict = _BUSY
        try:
            if job.part is not None:
                verdict = f"{_FAILED}killed"
                job.part.copied()
                self._write_part(target / f"rank_{self._rank}", job.record, job.part)
                verdict = _WRITTEN
        except BaseException as error:
            verdict = f"{_FAILED}{_first_cause(error)}"
            raise
        finally:
            if self._rank != 0:
                self._tell(self._key(job, self._rank), verdict)
        if self._rank == 0 and verdict == _WRITTEN:
            self._complete(target, job)

    def _write_part(self, part: Place, record: CommitRecord, mine: RankPart) -> None:
        def written() -> None:
            self._record.write(Kind.CHECKPOINT_BEGIN, step=record.step, lineage=record.hash)

        write_folder(part, mine.tensors, {"index": mine.index().to_plain()}, written)

    def _complete(self, target: Place, job: _Job) -> None:
        """Rank 0: wait for the other ranks, then write DCP's metadata and the manifest."""
        deadline = time.monotonic() + self._write_s
        for rank in range(1, self._ranks):
            said = self._await(self._key(job, rank), deadline, rank)
            self._store.delete(self._key(job, rank))
            if said == _BUSY:
                return  # with the one before, which is complete soon
            if said != _WRITTEN:
                raise Fatal(f"rank {rank} could not write its part: {said.removeprefix(_FAILED)}")
        job.flush_lineage()
        manifest = {
            "layout": LAYOUT,
            "record": job.record.to_json(),
            "mesh": self._mesh,
            "files": join_parts(target, self._ranks),
        }
        self._may_be_complete = True
        write_manifest(target, manifest)
        self.newest_step = max(self.newest_step, job.record.step)
        if self._ends(job.record):
            self._tell(kept_key(job.record), "yes")
        self._record.write(
            Kind.CHECKPOINT_END,
            step=job.record.step,
            lineage=job.record.hash,
            path=str(target),
            after_failover=job.after_failover,
        )
        self.trouble.worked(job.record.step)
        with suppress(OSError, Retryable):  # the next one deletes what is left
            delete_unfinished(target)
            settled = self._ends(job.record) or self._is_settled(job.record)
            if self._may_delete():  # one that may be superseded does not count
                prune(self._folder, self._keep + (not settled), job.record.step)

    def _await(self, key: str, deadline: float, rank: int) -> str:
        """What another rank says. Raises Retryable when it says nothing until the deadline, or the end."""
        while True:
            try:
                return self._store.wait(key, min(_LOOK_S, max(0.01, deadline - time.monotonic())))
            except Retryable as error:
                if time.monotonic() >= deadline or self._closed.wait(0.01):
                    raise Retryable(f"rank {rank} did not write its part in {self._write_s:g} s: {error}") from error

    def _tell(self, key: str, value: str) -> None:
        """Put a key, again and again while the store does not answer, for at most `write_s`."""
        deadline = time.monotonic() + self._write_s
        while True:
            try:
                self._store.put_if_absent(key, value)
                return
            except Retryable:
                if time.monotonic() >= deadline or self._closed.wait(_PAUSE_S):
                    raise

    def _ends(self, record: CommitRecord) -> bool:
        return record.step >= self._last_step or record.last != ""

    def _key(self, job: _Job, rank: int) -> str:
        return f"checkpoint/{self._life}/{job.record.hash}/{job.attempt}/{rank}"


def _first_cause(error: BaseException) -> str:
    """The text of an error; of DCP's, that of the first failure it wraps."""
    for inner, _ in getattr(error, "failures", {}).values():
        return _first_cause(inner)
    return str(error) or type(error).__name__
