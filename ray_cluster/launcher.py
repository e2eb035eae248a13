"""Ranks as Ray actors: the `Launcher` of a job on a Ray cluster.

One actor per rank and incarnation, never restarted by Ray (the controller's policy does that), never
detached: Ray ends them with the process that started them. The ranks of an incarnation share a placement group
(`placement`), and start when all of them are known and it has been made. On this process's own node a rank's end is seen at
once through its process id; on others as soon as Ray sees it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixrt.errors import Cause
from helixrt.ray_cluster.actors import CONCURRENCY_GROUPS, CONTROL_GROUP, RUN_GROUP, Outcome, Process, RankActor
from helixrt.ray_cluster.cluster import connect
from helixrt.ray_cluster.placement import Life, Placements
from helixrt.replica.contracts import Coordinate, Launcher, RankExit, RankSpec
from helixrt.replica.rank_log import RankEnd, describe_code, log_name, rank_end

KILL_AFTER_S = 0.5  # Ray ends a healthy process at once; a stopped one does not receive the request


@dataclass
class _Actor:
    """A rank that was started. `pidfd` is -1 until its process is known and on this node."""

    coordinate: Coordinate
    incarnation: int
    handle: Any
    process_ref: Any
    outcome_ref: Any
    log: Path
    pid: int = -1
    pidfd: int = -1
    node: str = ""  # of its process, once known
    ended: bool = False  # reported by `poll`
    kill_at_s: float | None = None  # the request to end it was sent to Ray; SIGKILL if it still runs then

    @property
    def name(self) -> str:
        return f"{self.coordinate} incarnation {self.incarnation}"


class RayLauncher(Launcher):
    """Connects to the cluster this process belongs to (RAY_ADDRESS), unless it is connected.

    `entry` is what a rank runs, `module:function`; `ranks`: of a replica; `num_cpus` and `num_gpus` are what each rank
    reserves. Calls come from one thread. Raises what `connect` raises.
    """

    def __init__(
        self,
        log_folder: Path,
        entry: str,
        environment: Mapping[str, str] | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        ranks: int = 1,
    ) -> None:
        self._connected = connect()
        import ray

        self._ray = ray
        self._node = ray.get_runtime_context().get_node_id()
        self._entry, self._environment, self._log_folder = entry, dict(environment or {}), log_folder
        options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            "concurrency_groups": CONCURRENCY_GROUPS,
        }
        self._actor_class = ray.remote(**options)(RankActor)
        self._reserved = {name: amount for name, amount in (("CPU", num_cpus), ("GPU", num_gpus)) if amount}
        self._ranks = ranks
        self._placements: Placements | None = None  # known with the run's name
        self._unplaced: dict[Life, list[RankSpec]] = {}
        self._cancelled: list[RankExit] = []
        self._started: set[tuple[Coordinate, int]] = set()
        self._actors: dict[tuple[Coordinate, int], _Actor] = {}
        self._closed = False

    def start(self, spec: RankSpec) -> None:
        key = (spec.coordinate, spec.incarnation)
        if key in self._started or self._closed:
            return
        self._started.add(key)
        self._unplaced.setdefault((spec.coordinate.replica, spec.incarnation), []).append(spec)
        self._start_placed()

    def _start_placed(self) -> None:
        """Start the replicas whose ranks are all known, as far as the cluster has a place for them."""
        for life, specs in list(self._unplaced.items()):
            if len(specs) < self._ranks:
                continue
            if self._placements is None:
                self._placements = Placements(specs[0].run, self._reserved, self._ranks)
            group = self._placements.place(life)
            if group is None:
                continue
            del self._unplaced[life]
            for index, spec in enumerate(specs):
                self._start_actor(spec, group, index)

    def _start_actor(self, spec: RankSpec, group: Any, index: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        key = (spec.coordinate, spec.incarnation)
        log = self._log_folder / log_name(*key)
        handle: Any = self._actor_class.options(
            name=f"{spec.run}/{spec.coordinate}.inc{spec.incarnation}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(self._entry, str(log), self._environment)
        process = handle.process.options(concurrency_group=CONTROL_GROUP).remote()
        outcome = handle.run.options(concurrency_group=RUN_GROUP).remote(spec.to_plain())
        self._actors[key] = _Actor(*key, handle, process, outcome, log)

    def poll(self) -> list[RankExit]:
        exits, self._cancelled = self._cancelled, []
        self._insist()
        for actor in self._living():
            self._find_process(actor)
            ended = self._exit_of(actor)
            if ended is not None:
                actor.ended = True
                self._end(actor)  # a rank that has returned still has its process
                exits.append(ended)
        for replica, incarnation in {(ended.coordinate.replica, ended.incarnation) for ended in exits}:
            self._free(replica, incarnation)
        self._forget_gone()
        self._start_placed()
        return exits

    def _forget_gone(self) -> None:
        """Those whose end was reported and whose process has ended: each holds a descriptor."""
        for key, actor in list(self._actors.items()):
            if actor.ended and not self._is_there(actor):
                if actor.pidfd >= 0:
                    os.close(actor.pidfd)
                del self._actors[key]

    def _free(self, replica: int, incarnation: int) -> None:
        """Give back the place of an incarnation that has no rank left."""
        here = [a for a in self._living() if (a.coordinate.replica, a.incarnation) == (replica, incarnation)]
        if self._placements is not None and not here and (replica, incarnation) not in self._unplaced:
            self._placements.remove((replica, incarnation))

    def pids(self, replica: int) -> list[int]:
        """The process ids, on this node, of a replica's ranks that have not been reported as ended."""
        mine = [a for a in self._living() if a.coordinate.replica == replica]
        for actor in mine:
            self._find_process(actor)
        return [a.pid for a in mine if a.pid > 0]

    def waiting(self, replica: int) -> bool:
        """Whether an actor of the replica has no process yet: Ray starts one as soon as the cluster has the resources."""
        mine = [a for a in self._living() if a.coordinate.replica == replica]
        for actor in mine:
            self._find_process(actor)
        return any(actor.process_ref is not None for actor in mine) or any(life[0] == replica for life in self._unplaced)

    def kill(self, replica: int) -> None:
        for life in [life for life in self._unplaced if life[0] == replica]:
            for spec in self._unplaced.pop(life):
                cause = Cause("was not started", f"{spec.coordinate} incarnation {spec.incarnation}")
                self._cancelled.append(RankExit(spec.coordinate, spec.incarnation, -int(signal.SIGKILL), str(cause)))
        for actor in self._living():
            if actor.coordinate.replica == replica:
                self._end(actor)

    def close(self) -> None:
        self._closed = True
        self._unplaced.clear()
        for actor in self._living():
            self._end(actor)
        deadline = time.monotonic() + 30
        while any(map(self._is_there, self._actors.values())) and time.monotonic() < deadline:
            self._insist()
            time.sleep(0.01)
        for actor in self._actors.values():
            if actor.pidfd >= 0:
                os.close(actor.pidfd)
            if self._placements is not None:
                self._placements.remove((actor.coordinate.replica, actor.incarnation))
        self._actors.clear()
        if self._connected:
            self._connected = False
            self._ray.shutdown()

    def _living(self) -> list[_Actor]:
        return [a for a in self._actors.values() if not a.ended]

    def _find_process(self, actor: _Actor) -> None:
        """Learn the actor's process once it runs, if it is on this node and the system can watch it."""
        if actor.process_ref is None or not self._ray.wait([actor.process_ref], timeout=0)[0]:
            return
        ref, actor.process_ref = actor.process_ref, None
        try:
            process: Process = self._ray.get(ref)
            actor.node = process.node
            if process.node == self._node:
                actor.pid = process.pid
                actor.pidfd = os.pidfd_open(process.pid)
        except (self._ray.exceptions.RayError, OSError, AttributeError):
            pass  # it has ended already, or this system has no such descriptors: Ray reports its end

    def _exit_of(self, actor: _Actor) -> RankExit | None:
        if self._ray.wait([actor.outcome_ref], timeout=0)[0]:
            try:
                outcome: Outcome = self._ray.get(actor.outcome_ref)
            except self._ray.exceptions.RayError as lost:
                return self._vanished(actor, _first_line(lost))
            end = RankEnd(outcome.error) if outcome.error or not outcome.code else rank_end(actor.log)
            what = f"{end.why} ({describe_code(outcome.code)})" if end.why else describe_code(outcome.code)
            cause = Cause(what, actor.name, str(actor.log))
            return RankExit(actor.coordinate, actor.incarnation, outcome.code, str(cause), end.error, actor.node)
        if actor.pidfd >= 0 and not self._is_there(actor):
            return self._vanished(actor, f"process {actor.pid} is gone")
        return None

    def _vanished(self, actor: _Actor, how: str) -> RankExit:
        """Ray does not tell how a process ended; without a word is how SIGKILL ends one."""
        code = -int(signal.SIGKILL)
        cause = Cause(f"ended without a result, as if {describe_code(code)}: {how}", actor.name, str(actor.log))
        return RankExit(actor.coordinate, actor.incarnation, code, str(cause))

    def _is_there(self, actor: _Actor) -> bool:
        """Whether the actor's process still runs, as far as can be seen from here."""
        self._find_process(actor)
        if actor.pidfd >= 0:
            ended = select.poll()  # not `select`, which takes descriptors up to 1023 alone
            ended.register(actor.pidfd, select.POLLIN)
            return not ended.poll(0)
        return not self._ray.wait([actor.outcome_ref], timeout=0)[0]

    def _end(self, actor: _Actor) -> None:
        """Through Ray, so that it is no failure in its eyes; `_insist` makes sure."""
        if actor.kill_at_s is None:
            actor.kill_at_s = time.monotonic() + KILL_AFTER_S
            self._ray.kill(actor.handle, no_restart=True)

    def _insist(self) -> None:
        for actor in self._actors.values():
            if actor.kill_at_s is not None and actor.pidfd >= 0 and time.monotonic() > actor.kill_at_s:
                try:
                    signal.pidfd_send_signal(actor.pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # gone


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
