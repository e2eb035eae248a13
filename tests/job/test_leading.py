"""The leading rank of a replica: what it says to the user while it waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helixrt.errors import Retryable
from helixrt.job.leading import Leading


def test_a_replica_that_waits_for_a_silent_storage_says_so_once() -> None:
    said: list[str] = []

    def silent(newer_than: int) -> str:
        raise Retryable("s3://bucket/run does not answer: timed out")

    leading = object.__new__(Leading)
    leading._said_silent = False
    parts = SimpleNamespace(durable=SimpleNamespace(newest=silent), genesis=None, metrics=SimpleNamespace(say=said.append))
    leading._parts = parts  # type: ignore[assignment]
    for _ in range(3):
        with pytest.raises(Retryable):
            leading._newest_durable(-1)
    assert said == ["the replica waits until it can read the run's checkpoints: s3://bucket/run does not answer: timed out"]
