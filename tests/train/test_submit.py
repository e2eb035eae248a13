"""What `helixrt.train.submit` says when a cluster does not take it; no cluster is started."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixrt.errors import ConfigError
from helixrt.train import submit as submission
from helixrt.train.schema import load_config
from helixrt.train.submit import attach, entrypoint, submit, use_token

ray = pytest.importorskip("ray", reason="ray is not installed")
from ray import job_submission  # noqa: E402
from ray.job_submission import JobStatus  # noqa: E402


def test_a_cluster_that_wants_a_token_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.exceptions
    import ray.job_submission

    def refuse(address: str | None) -> None:
        raise ray.exceptions.AuthenticationError("Missing authentication token\nmore\nlines")

    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", refuse)
    with pytest.raises(ConfigError) as caught:
        submit("http://127.0.0.1:1", [])
    assert str(caught.value).startswith("RAY_ADDRESS=http://127.0.0.1:1: requires a token")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("has", [True, False])
def test_a_token_is_shown_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has: bool) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if has:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
    use_token()
    import os

    assert os.environ.get("RAY_AUTH_MODE") == ("token" if has else None)


class Cluster:
    """A job's log as a cluster gives it whose connection breaks: `says` in turn, an exception or what has come by then."""

    def __init__(self, *says: object) -> None:
        self.says, self.text, self.stopped = list(says), "", 0
        self.broken: BaseException | None = None
        self.job: dict[str, Any] = {}

    def submit_job(self, **job: Any) -> None:
        self.job = job

    def stop_job(self, job: str) -> None:
        self.stopped += 1

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        says = self.says.pop(0)
        if isinstance(says, BaseException):
            self.broken = says
            raise says
        self.text, self.broken = str(says), None
        yield self.text[: len(self.text) // 2]
        yield self.text[len(self.text) // 2 :]

    def get_job_status(self, job: str) -> JobStatus:
        if self.broken is not None:
            raise ConnectionError(f"{job} is out of reach\nmore")
        return JobStatus.SUCCEEDED if not self.says else JobStatus.RUNNING

    def get_job_logs(self, job: str) -> str:
        return self.text

    def get_job_info(self, job: str) -> Any:
        return SimpleNamespace(driver_exit_code=7)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    def make(*says: object) -> Cluster:
        made = Cluster(*says)
        monkeypatch.setattr(job_submission, "JobSubmissionClient", lambda address: made)
        monkeypatch.setattr(submission.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.7:8265")
        return made

    return make


def test_a_lost_connection_is_made_again_and_each_line_is_shown_once(
    cluster: Callable[..., Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    lost = ValueError("of no common class")
    made = cluster("one\ntw", lost, lost, "one\ntwo\nthr", "one\ntwo\nthree")
    assert submit(None, []) == 7 and made.stopped == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["one", "two", "three"]
    (line,) = said.err.splitlines()
    assert line.startswith("the connection to the cluster is lost") and line.endswith("is out of reach); the job goes on")


def test_a_job_is_left_alone_by_a_cluster_that_stays_away(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "RECONNECT_S", -1.0)
    made = cluster(*[OSError("gone")] * 3)
    with pytest.raises(submission.Unreachable, match=r"job helixrt-\w+ goes on; follow it with: helixrt attach helixrt-"):
        submit(None, [])
    assert made.stopped == 0


def test_ctrl_c_stops_a_job_that_was_submitted_and_none_that_is_attached_to(
    cluster: Callable[..., Cluster], capsys: pytest.CaptureFixture[str]
) -> None:
    made = cluster(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        submit(None, [])
    assert made.stopped == 1
    made = cluster(KeyboardInterrupt())
    assert attach("helixrt-1") == 130 and made.stopped == 0
    assert "helixrt attach helixrt-1" in capsys.readouterr().err
    made = cluster("all")
    assert attach("helixrt-1") == 7 and capsys.readouterr().out == "all\n"


NAMES = "dir (1)|a,b|x=y|it's|a b|proj{1}|a:b|a#b|~t|a$b|a[1]|b\\|q\\'q|${oc.env:HOME}|null|µ|\\\\'".split("|")


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_a_job_writes_where_its_command_stands_whatever_the_folder_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    seen: list[list[str]] = []
    monkeypatch.setattr(submission, "run", lambda config, overrides, detach: seen.append(overrides) or 0)
    assert submission.main([]) == 0
    assert load_config(seen[0]).output.root == str(tmp_path / name / "outputs")
    assert shlex.split(entrypoint(seen[0]))[-2:] == seen[0], "and through the job's shell"


def test_the_folder_of_a_job_is_the_one_that_its_settings_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[list[str]] = []
    monkeypatch.setattr(submission, "run", lambda config, overrides, detach: seen.append(overrides) or 0)
    assert submission.main(["output.root='a, b'"]) == submission.main(["output.root=${oc.env:ELSEWHERE,/else}/r"]) == 0
    assert [load_config(overrides).output.root for overrides in seen] == [str(tmp_path / "a, b"), "/else/r"]


def test_a_detached_job_is_named_and_needs_a_cluster_that_stays(
    cluster: Callable[..., Cluster], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster()
    assert submit(None, ["steps=3"], detach=True) == 0 and made.stopped == 0
    assert "steps=3" in made.job["entrypoint"] and str(made.job["submission_id"]) in capsys.readouterr().out
    monkeypatch.delenv("RAY_ADDRESS")
    assert submission.main(["--detach"]) == 2
    assert capsys.readouterr().err.startswith("argument=--detach: needs RAY_ADDRESS")
    with pytest.raises(ConfigError, match="RAY_ADDRESS=: is not set"):
        attach("helixrt-1")
