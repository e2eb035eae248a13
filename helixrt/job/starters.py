"""Which process of which replica this is, as torchrun, Slurm or the user says it in variables of the environment.

In: the environment and the mesh of a replica. Out: a `Place`. Whoever starts the processes says which replica they are:

    HELIXRT_STORE         host:port of the run's store, as `helixrt serve` prints it
    HELIXRT_REPLICA       which replica this process belongs to, from 0
    HELIXRT_SECRET        the run's secret, or
    HELIXRT_SECRET_FILE   the file that holds it

A replica of several ranks is one torchrun (RANK of WORLD_SIZE), or one srun (SLURM_PROCID of its tasks). One srun may have the
tasks of several replicas too, those of a replica next to each other. Processes that nobody known started read RANK and
WORLD_SIZE as well, if the mesh has several ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from helixrt.errors import ConfigError, Fatal
from helixrt.job.mesh import Mesh

STORE, REPLICA, SECRET, SECRET_FILE = "HELIXRT_STORE", "HELIXRT_REPLICA", "HELIXRT_SECRET", "HELIXRT_SECRET_FILE"
# A Ray cluster may run inside a Slurm allocation, and torchrun inside a Ray job: the innermost first.
_STARTERS = {"TORCHELASTIC_RUN_ID": "torchrun", "RAY_JOB_CONFIG_JSON_ENV_VAR": "Ray", "SLURM_STEP_ID": "Slurm"}
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM_MAX_NORMAL_STEP_ID; from here on: the shell that salloc opens, a batch script
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # FOLDER/attempt_N/LOCAL_RANK/error.json; the folder is of this torchrun alone
_AGAIN = "comes_again"  # beside it: with which error that process has ended
# What all processes of one start have in common, and no other start has, as far as the starter tells it.
_ATTEMPTS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", _RESTARTS, "MASTER_ADDR", "MASTER_PORT"),
    "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}
# By which others tell a process how many there are, if the second one is set, too. PET_NNODES may be MIN:MAX.
_SIZES = {
    "WORLD_SIZE": "RANK",
    "PET_NNODES": "PET_NNODES",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
_LOCAL_RANKS = {"torchrun": "LOCAL_RANK", "Slurm": "SLURM_LOCALID"}


@dataclass(frozen=True)
class Place:
    """What a process is told about the run that it joins.

    `rank`: its group rank, of the `ranks` of its replica. `attempt` names the start that it belongs to: equal for the ranks of
    a replica that were started together. `local_rank`: its number on this machine, and that of its CUDA device; -1 if nobody
    says it.
    """

    store: str
    replica: int
    secret: str
    rank: int = 0
    ranks: int = 1
    attempt: str = ""
    local_rank: int = -1


def starter(environ: Mapping[str, str] = os.environ) -> str:
    """Who started this process: torchrun, Slurm or Ray; "" for nobody known. What a user starts in the shell of a Slurm job, by
    hand or by the job's script, is no task of Slurm."""
    found = (who for variable, who in _STARTERS.items() if variable in environ)
    return next((who for who in found if who != "Slurm" or _is_srun(environ)), "")


def _is_srun(environ: Mapping[str, str]) -> bool:
    """Whether the job step was made by srun for a command; `salloc` makes one for its shell, too."""
    step = environ["SLURM_STEP_ID"]
    return not (step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP)


def note_again(why: str, environ: Mapping[str, str] = os.environ) -> None:
    """Of an error that would come again: torchrun starts anew whatever ends with an error, and knows nothing of its kind."""
    if environ.get(_ERROR_FILE):
        with suppress(OSError):
            Path(environ[_ERROR_FILE]).with_name(_AGAIN).write_text(why, encoding="utf-8")


def check_before(environ: Mapping[str, str] = os.environ) -> None:
    """Raises Fatal for a process that torchrun starts after such an error."""
    if environ.get(_ERROR_FILE):
        for noted in Path(environ[_ERROR_FILE]).parents[2].glob(f"attempt_*/*/{_AGAIN}"):
            raise Fatal(f"not started again by torchrun, since this would come again: {noted.read_text(encoding='utf-8')}")


def check_alone(launcher: str, environ: Mapping[str, str] = os.environ) -> str:
    """The launcher, of a process whose environment names no run. Raises ConfigError if it says that there are others beside it:
    each of them would start a run of its own."""
    for variable, rank in _SIZES.items():
        size = environ.get(variable, "").rpartition(":")[2]
        if rank in environ and size.isdigit() and int(size) > 1:
            rule = f"this process is one of {size}, and each would train a run of its own; {_ways(launcher)}"
            raise ConfigError(variable, environ[variable], rule)
    return launcher


def _ways(launcher: str) -> str:
    serve = "for one run start `helixrt serve --replicas N`, and set the variables that it prints"
    return f'{serve}; for a run that this process starts give launcher="{launcher}"'


def place_of(environ: Mapping[str, str] = os.environ, mesh: Mesh = Mesh()) -> Place:  # noqa: B008 frozen
    """Raises ConfigError, with the variable that is missing or wrong, or a number of processes that is not that of the mesh."""
    who = starter(environ)
    if not environ.get(STORE):
        raise ConfigError(STORE, "", f"is not set; {_ways('local')}")
    rank, before = _rank(environ, who, mesh)
    replica = environ.get(REPLICA, "")
    if not replica.isdigit():
        tasks = "$SLURM_PROCID" if mesh.ranks == 1 else f"$((SLURM_PROCID / {mesh.ranks}))"
        hint = f" (in a Slurm array: HELIXRT_REPLICA=$SLURM_ARRAY_TASK_ID; for all replicas in one srun: {tasks})"
        rule = f"must be the number of the replica that this process belongs to, from 0{hint if who == 'Slurm' else ''}"
        raise ConfigError(REPLICA, replica, rule)
    if int(replica) < before:
        rule = f"this task is behind those of {before} other replicas in its srun; set $((SLURM_PROCID / {mesh.ranks}))"
        raise ConfigError(REPLICA, replica, rule)
    attempt = _attempt(environ, who)
    return Place(environ[STORE], int(replica), _secret(environ), rank, mesh.ranks, attempt, _local_rank(environ, who))


def _rank(environ: Mapping[str, str], who: str, mesh: Mesh) -> tuple[int, int]:
    """The group rank of this process, and how many replicas have tasks before it in the same srun."""
    ranks = mesh.ranks
    if who == "Slurm":
        if ranks == 1:  # each task is a replica of its own
            return 0, 0
        variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        tasks, task = _number(environ, variable, "1"), _number(environ, "SLURM_PROCID", "0")
        if tasks % ranks or not tasks:
            rule = f"{mesh} has {ranks} ranks in each replica: start one srun with {ranks} tasks for each, or one for all"
            raise ConfigError(variable, tasks, rule)
        return task % ranks, task // ranks
    if who != "torchrun" and ranks == 1:
        return 0, 0
    size, rank = _number(environ, "WORLD_SIZE", "1"), _number(environ, "RANK", "0")
    if size != ranks:
        processes = "process" if ranks == 1 else "processes"
        how = f"start torchrun once for each replica, with {ranks} {processes} (--nproc-per-node {ranks})"
        if who != "torchrun":
            how = f"start {ranks} processes for each, with RANK 0 to {ranks - 1} and WORLD_SIZE={ranks}"
        raise ConfigError("WORLD_SIZE", size, f"{mesh} has {ranks} rank{'s' * (ranks > 1)} in each replica: {how}")
    if rank >= size:
        raise ConfigError("RANK", rank, f"must be below WORLD_SIZE={size}")
    return rank, 0


def _attempt(environ: Mapping[str, str], who: str) -> str:
    """Each torchrun of several machines counts the restarts that it began itself: there the count differs inside one start. It
    is not needed there: torchrun starts the processes of a round when those of the round before have ended on all machines that
    take part, and `claims` has the newest claim of an attempt take the place of an older one."""
    alike = _ATTEMPTS.get(who, ())
    if environ.get("GROUP_WORLD_SIZE", "1") != "1":
        alike = tuple(variable for variable in alike if variable != _RESTARTS)
    return "/".join(environ.get(variable, "") for variable in alike)


def _local_rank(environ: Mapping[str, str], who: str) -> int:
    if who == "Slurm" and environ.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0:
        return 0  # Slurm shows each task its own device
    local = environ.get(_LOCAL_RANKS.get(who, ""), "")
    return int(local) if local.isdigit() else -1


def _number(environ: Mapping[str, str], variable: str, default: str) -> int:
    text = environ.get(variable, default)
    if not text.isdigit():
        raise ConfigError(variable, text, "must be a number from 0")
    return int(text)


def _secret(environ: Mapping[str, str]) -> str:
    if secret := environ.get(SECRET):
        return secret
    file = environ.get(SECRET_FILE)
    if not file:
        raise ConfigError(SECRET, "", f"is not set; set it, or {SECRET_FILE} to the file that `helixrt serve` names")
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(SECRET_FILE, file, f"cannot be read: {error.strerror}") from error
    if not secret:
        raise ConfigError(SECRET_FILE, file, "is empty")
    return secret
