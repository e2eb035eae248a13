"""What tests of several folders share."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

RunStages = Callable[..., list[Any]]


@pytest.fixture
def run_stages(monkeypatch: pytest.MonkeyPatch) -> RunStages:
    """`run_stages(n, fn)` calls fn(stage, group) on n threads, each a rank of one Gloo group; gives their results.

    The group is real (loopback sockets); only processes are spared. The first error is raised here.
    """
    import torch
    import torch.distributed as dist

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)

    def run(stages: int, fn: Callable[[int, Any], Any], timeout_s: float = 20.0) -> list[Any]:
        store = dist.HashStore()
        results: list[Any] = [None] * stages
        errors: list[BaseException] = []

        def body(stage: int) -> None:
            try:
                group = dist.ProcessGroupGloo(store, stage, stages, timedelta(seconds=timeout_s))
                results[stage] = fn(stage, group)
            except BaseException as error:  # handed to the test's thread
                errors.append(error)

        threads = [threading.Thread(target=body, args=(s,), name=f"stage-{s}", daemon=True) for s in range(stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * timeout_s)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a stage did not end in time"
        return results

    return run


@pytest.fixture(scope="session")
def plain_engine() -> Any:
    """The class in tests/plain_engine.py (tests are not a package, so they cannot import it)."""
    spec = importlib.util.spec_from_file_location("plain_engine", Path(__file__).with_name("plain_engine.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PlainEngine
