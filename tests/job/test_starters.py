"""Which rank of which replica a process is, by the variables of torchrun, of Slurm, or of nobody known."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixrt.errors import ConfigError, Fatal
from helixrt.job.mesh import Mesh
from helixrt.job.starters import Place, check_before, note_again, place_of, starter

SECRET = "a secret of the run"
SOUND = {"HELIXRT_STORE": "host:1", "HELIXRT_REPLICA": "2", "HELIXRT_SECRET": SECRET}
TORCHRUN = {
    **SOUND,
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "MASTER_ADDR": "host9",
    "MASTER_PORT": "29",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
}
SLURM = {**SOUND, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
TWO, FOUR = Mesh(dp_shard=2), Mesh(pp=4)


def test_a_place_is_read_from_variables(tmp_path: Path) -> None:
    assert place_of(SOUND) == Place("host:1", 2, SECRET)
    (tmp_path / "secret").write_text(SECRET + "\n")
    by_file = {k: v for k, v in SOUND.items() if k != "HELIXRT_SECRET"} | {"HELIXRT_SECRET_FILE": str(tmp_path / "secret")}
    assert place_of(by_file) == Place("host:1", 2, SECRET)


def test_the_processes_of_a_torchrun_are_the_ranks_of_a_replica() -> None:
    assert place_of(TORCHRUN, TWO) == Place("host:1", 2, SECRET, 1, 2, "job/3/host9/29", 1)
    first = place_of({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, TWO)
    assert (first.rank, first.attempt) == (0, "job/3/host9/29"), "equal for all processes of a start"
    for again in ({"TORCHELASTIC_RESTART_COUNT": "4"}, {"MASTER_PORT": "30"}, {"TORCHELASTIC_RUN_ID": "other"}):
        assert place_of({**TORCHRUN, **again}, TWO).attempt != first.attempt
    assert place_of({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}).ranks == 1


def test_the_tasks_of_an_srun_are_the_ranks_of_a_replica() -> None:
    assert place_of(SLURM, TWO) == Place("host:1", 2, SECRET, 1, 2, "77/4/", 1)
    assert place_of({**SLURM, "SLURM_RESTART_COUNT": "1"}, TWO).attempt == "77/4/1", "a job that was put back into the queue"
    # the allocation may have more tasks than this step
    assert place_of({**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}, TWO).rank == 1


def test_an_array_has_a_replica_in_each_element() -> None:
    element = {**SLURM, "SLURM_ARRAY_TASK_ID": "5", "HELIXRT_REPLICA": "5", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
    assert place_of(element, FOUR) == Place("host:1", 5, SECRET, 3, 4, "77/4/", 1)


@pytest.mark.parametrize("mesh", [Mesh(), TWO, FOUR])
def test_one_srun_may_have_the_tasks_of_all_replicas(mesh: Mesh) -> None:
    tasks = 3 * mesh.ranks
    found = []
    for task in range(tasks):
        replica = {"HELIXRT_REPLICA": str(task // mesh.ranks)}  # HELIXRT_REPLICA=$((SLURM_PROCID / ranks))
        found.append(place_of({**SLURM, **replica, "SLURM_NTASKS": str(tasks), "SLURM_PROCID": str(task)}, mesh))
    assert [(place.replica, place.rank) for place in found] == [(r, k) for r in range(3) for k in range(mesh.ranks)]


def test_the_shell_that_salloc_opens_is_no_task() -> None:
    """With LaunchParameters=use_interactive_step it runs in a step of its own; 22.05 gives it this number."""
    shell = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert starter(shell) == "" and starter({**shell, "SLURM_STEP_ID": "0"}) == "Slurm"
    assert starter({**shell, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}) == "Ray"


def test_processes_that_nobody_known_started_say_their_rank() -> None:
    assert place_of({**SOUND, "RANK": "3", "WORLD_SIZE": "4"}, FOUR) == Place("host:1", 2, SECRET, 3, 4)
    assert place_of({**SOUND, "RANK": "3", "WORLD_SIZE": "4"}) == Place("host:1", 2, SECRET), "variables of something else"


def test_the_cuda_device_of_a_rank_is_that_of_its_number_on_the_machine() -> None:
    assert place_of({**TORCHRUN, "CUDA_VISIBLE_DEVICES": "3"}, TWO).local_rank == 1
    assert place_of({**SLURM, "CUDA_VISIBLE_DEVICES": "2,3"}, TWO).local_rank == 1
    assert place_of({**SLURM, "CUDA_VISIBLE_DEVICES": "3"}, TWO).local_rank == 0, "Slurm shows each task its own"


MISSING = r"HELIXRT_REPLICA=: must be the number of the replica .*HELIXRT_REPLICA=\$SLURM_ARRAY_TASK_ID; for all .*: "


@pytest.mark.parametrize(
    ("variables", "mesh", "rule"),
    [
        ({**SOUND, "HELIXRT_STORE": ""}, Mesh(), "HELIXRT_STORE=: is not set; for one run start `helixrt serve"),
        ({**SOUND, "HELIXRT_REPLICA": ""}, Mesh(), "HELIXRT_REPLICA=: must be the number of the replica"),
        ({**SOUND, "HELIXRT_REPLICA": "-1"}, Mesh(), "HELIXRT_REPLICA=-1: must be the number"),
        ({**SOUND, "HELIXRT_SECRET": ""}, Mesh(), "HELIXRT_SECRET=: is not set; set it, or HELIXRT_SECRET_FILE"),
        (
            {**SOUND, "HELIXRT_SECRET": "", "HELIXRT_SECRET_FILE": "/nowhere"},
            Mesh(),
            "HELIXRT_SECRET_FILE=/nowhere: cannot be read",
        ),
        (
            TORCHRUN,
            Mesh(),
            r"WORLD_SIZE=2: Mesh\(\) has 1 rank in each replica: start torchrun once for each replica, with 1 process ",
        ),
        (TORCHRUN, FOUR, r"WORLD_SIZE=2: Mesh\(pp=4\) has 4 ranks in each replica: .*with 4 processes \(--nproc-per-node 4\)"),
        ({**TORCHRUN, "RANK": "2"}, TWO, "RANK=2: must be below WORLD_SIZE=2"),
        ({**TORCHRUN, "RANK": "x"}, TWO, "RANK=x: must be a number from 0"),
        (SOUND, TWO, r"WORLD_SIZE=1: Mesh\(dp_shard=2\) has 2 ranks .*: start 2 processes for each, with RANK 0 to 1"),
        ({**SLURM, "SLURM_NTASKS": "3"}, TWO, r"SLURM_NTASKS=3: Mesh\(dp_shard=2\) has 2 ranks .*: start one srun with 2"),
        ({**SLURM, "HELIXRT_REPLICA": ""}, Mesh(), MISSING + r"\$SLURM_PROCID"),
        ({**SLURM, "HELIXRT_REPLICA": ""}, TWO, MISSING + r"\$\(\(SLURM_PROCID / 2\)\)"),
        (
            {**SLURM, "HELIXRT_REPLICA": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"},
            TWO,
            "HELIXRT_REPLICA=0: this task is behind those of 1 other replicas in its srun",
        ),
    ],
)
def test_a_missing_or_wrong_variable_is_named(variables: dict[str, str], mesh: Mesh, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        place_of(variables, mesh)


def test_what_would_come_again_is_not_tried_again_by_the_same_torchrun(tmp_path: Path) -> None:
    attempts = [{"TORCHELASTIC_ERROR_FILE": str(tmp_path / f"attempt_{n}" / str(n) / "error.json")} for n in range(2)]
    for attempt in attempts:
        Path(attempt["TORCHELASTIC_ERROR_FILE"]).parent.mkdir(parents=True)
        check_before(attempt)
    note_again("ModuleNotFoundError: No module named 'none'", attempts[0])
    with pytest.raises(Fatal, match="not started again by torchrun, since this would come again: ModuleNotFoundError"):
        check_before(attempts[1])
    for without in ({}, {"TORCHELASTIC_ERROR_FILE": ""}):
        note_again("of a process that torchrun has not started, or that has no such file", without)
        check_before(without)
