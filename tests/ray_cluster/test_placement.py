"""Where replicas are placed, which clusters are refused, and what travels to the nodes. No Ray is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig, OutputConfig, RayConfig
from helixrt.job.ray_run import code_of
from helixrt.job.session_config import SessionConfig
from helixrt.job.train_function import CODE_VARIABLE, TrainFunction, on_this_node
from helixrt.ray_cluster.cluster import check_version, connect
from helixrt.ray_cluster.placement import SETTLE_S, Apart, Later, NodeRoom, Together, choose
from helixrt.ray_cluster.storage import check_shared
from helixrt.replica.versions import versions

GPUS = {"CPU": 1.0, "GPU": 1.0}


def room(node: str, free: int, total: int = 4, replicas: int = 0) -> NodeRoom:
    return NodeRoom(node, {"CPU": 16.0, "GPU": total}, {"CPU": 16.0, "GPU": free}, replicas)


def test_replicas_go_one_by_one_to_the_node_with_the_fewest() -> None:
    held = {"a": 0, "b": 0, "c": 0}
    for _ in range(6):
        nodes = [room(node, 8 - 2 * count, 8, count) for node, count in held.items()]
        chosen = choose(nodes, GPUS, 2, 0.0)
        assert isinstance(chosen, Together)
        held[chosen.node] += 1
    assert held == {"a": 2, "b": 2, "c": 2}


def test_a_node_with_fewer_replicas_and_no_room_is_not_taken() -> None:
    assert choose([room("a", 1), room("b", 4, replicas=3)], GPUS, 4, 0.0) == Together("b")


def test_a_replica_waits_for_a_node_that_could_hold_it_and_then_is_packed_on_several() -> None:
    nodes = [room("a", 2), room("b", 2)]
    assert choose(nodes, GPUS, 4, 0.0) == Later() == choose(nodes, GPUS, 4, SETTLE_S - 0.1)
    assert choose(nodes, GPUS, 4, SETTLE_S) == Apart()


def test_a_replica_that_no_node_can_hold_is_packed_on_several_at_once() -> None:
    assert choose([room("a", 4), room("b", 4)], GPUS, 8, 0.0) == Apart()
    assert choose([], GPUS, 1, 0.0) == Apart(), "Ray waits for a node"
    assert choose([NodeRoom("a", {"CPU": 1.0}, {})], {"CPU": 0.0}, 1, 0.0) == Together("a"), "nothing is reserved"


def test_a_version_without_tokens_is_refused_where_other_machines_reach_it() -> None:
    check_version("2.40.0", "127.3.2.1")
    check_version("2.52.0", "10.0.0.7")
    check_version("3.0.0.dev0", "10.0.0.7")
    for version, address in (("2.40.0", "10.0.0.7"), ("2.51.1", "0.0.0.0")):
        with pytest.raises(ConfigError, match=rf"ray={version}: its servers at {address} run programs of any client; Ray 2.52"):
            check_version(version, address)


def test_a_folder_that_is_too_large_to_travel_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    too_large = (  # as Ray 2.60 says it
        f"Failed to upload working_dir {tmp_path} to the Ray cluster: Package size (700.31MiB) exceeds the maximum size of "
        "512.00MiB. To exclude large files, add them to '.gitignore'"
    )

    def refuse(**options: object) -> None:
        raise ray.exceptions.RuntimeEnvSetupError(too_large)

    ended: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(ConfigError) as refused:
        connect({"working_dir": str(tmp_path)})
    said = (
        "Package size (700.31MiB) exceeds the maximum size of 512.00MiB; name what ranks do not need in its .gitignore, or set"
    )
    assert str(refused.value).startswith(f"ray.code={tmp_path}: cannot be copied to the nodes: {said} ray.code=none")
    assert ended == [True], "it was connected"


def config(folder: Path, code: str = "", path: str = "") -> SessionConfig:
    job = replace(JobConfig(), ray=RayConfig(code=code), output=OutputConfig(str(folder / "results")), launcher="ray")
    return SessionConfig.of(job, train=TrainFunction("", "train", str(folder / "train.py"), path))


def test_the_folder_of_the_program_travels_without_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    env = code_of(config(tmp_path, path=str(tmp_path)))
    assert env is not None and env["working_dir"] == str(tmp_path) and env["env_vars"] == {CODE_VARIABLE: str(tmp_path)}
    assert "results" in env["excludes"] and ".git" in env["excludes"]
    assert code_of(config(tmp_path, code="none", path=str(tmp_path))) is None
    assert code_of(config(tmp_path)) is None, "a module of an installed package"
    with pytest.raises(ConfigError, match=r"ray\.code=.*/nowhere: is no folder"):
        code_of(config(tmp_path, code=str(tmp_path / "nowhere")))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert code_of(config(tmp_path, path=str(tmp_path))) is None, "a Ray job has brought its own"


@pytest.mark.parametrize("answer", [("", {**versions(), "helixrt": "99.1"}), "", ("no such file", {})])
def test_a_node_with_another_version_is_named(answer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    node = {"Alive": True, "Resources": {"CPU": 1.0}, "NodeID": "a" * 56, "NodeManagerAddress": "10.0.0.3"}
    asked = SimpleNamespace(options=lambda **options: asked, remote=lambda sign, word: answer)
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(ray, "remote", lambda **options: lambda function: asked)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    with pytest.raises(ConfigError, match=r"helixrt=.*: node 10\.0\.0\.3 has .*; install the same version on all machines"):
        check_shared(tmp_path, {"CPU": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_rank_finds_the_program_in_its_copy_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    monkeypatch.chdir(copy)
    monkeypatch.setenv(CODE_VARIABLE, "/home/user/project")
    assert on_this_node("/home/user/project/sub/train.py") == str(copy / "sub" / "train.py")
    assert on_this_node("/home/user/project") == str(copy)
    assert on_this_node("/home/user/other.py") == "/home/user/other.py"
    assert on_this_node("") == ""
