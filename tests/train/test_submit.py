"""What `helixrt.train.submit` says when a cluster does not take it; no cluster is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixrt.errors import ConfigError
from helixrt.train.submit import submit, use_token

ray = pytest.importorskip("ray", reason="ray is not installed")


def test_a_cluster_that_wants_a_token_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.exceptions
    import ray.job_submission

    def refuse(address: str | None) -> None:
        raise ray.exceptions.AuthenticationError("Missing authentication token\nmore\nlines")

    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", refuse)
    with pytest.raises(ConfigError) as caught:
        submit("http://127.0.0.1:1", [])
    assert str(caught.value).startswith("RAY_ADDRESS=http://127.0.0.1:1: asks for a token")
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
