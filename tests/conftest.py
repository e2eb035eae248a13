"""What tests of several folders share: what a marker needs of the machine, seeds, a group of stages."""

from __future__ import annotations

import importlib.util
import multiprocessing.spawn
import os
import secrets
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from helixrt import doctor

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests start many processes on few cores
settings.register_profile("helixrt", deadline=None, print_blob=True, derandomize=True)  # tests never assert time
settings.load_profile("helixrt")

RunStages = Callable[..., list[Any]]


def pytest_configure() -> None:
    """Started in the background or under nohup, a process has these ignored, and so would all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", default="", help="seed of the `seed` fixture: a number, or `random`; by default each test has its own"
    )


@pytest.fixture(scope="session", autouse=True)
def _spawned_processes_find_test_modules() -> Iterator[None]:
    """Test modules are imported by their files, the checkout is on no path; a spawned child must look there all the same.

    (On everybody's path it would make `passes` and `triton_kernels` importable by their bare names.)
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def with_checkout(name: str) -> dict[str, Any]:
        data = prepare(name)
        return data | {"sys_path": [*data["sys_path"], str(Path(__file__).parents[1])]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.spawn, "get_preparation_data", with_checkout)
        yield


def lacking(marker: str) -> str:
    """Why this machine cannot run tests with `marker`; empty when it can."""
    if marker == "ray":
        finding = next(doctor.look_at_package(package) for package in doctor.PACKAGES if package.distribution == "ray")
    elif marker == "netns":
        finding = doctor.look_at_namespaces()
    elif marker == "rdma":
        finding = doctor.look_at_rdma()
    elif marker == "gpu":
        finding = doctor.look_at_accelerator()
    elif marker == "notebook":
        return "" if importlib.util.find_spec("nbclient") else "nbclient is missing: pip install 'helixrt[notebooks]'"
    else:
        return ""
    return "" if finding.works else f"{finding.name}: {finding.detail} -> {finding.fix}"


@pytest.fixture(scope="session")
def machine_lacks() -> dict[str, str]:
    """What `lacking` answered, marker by marker, asked once."""
    return {}


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest, machine_lacks: dict[str, str]) -> None:
    """Skips, with the reason, what this machine cannot run; in CI a missing Ray or namespace is a failure."""
    for marker in ("ray", "netns", "rdma", "gpu", "notebook"):
        if request.node.get_closest_marker(marker) is None:
            continue
        if marker not in machine_lacks:
            machine_lacks[marker] = lacking(marker)
        if not (reason := machine_lacks[marker]):
            continue
        if os.environ.get("CI") == "true" and marker in ("ray", "netns", "notebook"):
            pytest.fail(f"CI must run tests marked {marker}, but {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this test, printed with the line that replays it. Stable from run to run unless --seed says otherwise."""
    wanted = request.config.getoption("--seed")
    if wanted == "random":
        value = secrets.randbelow(2**32)
    else:
        value = int(wanted) if wanted else zlib.crc32(request.node.nodeid.encode())
    print(f"seed {value}; replay: pytest '{request.node.nodeid}' --seed {value}")
    return value


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
