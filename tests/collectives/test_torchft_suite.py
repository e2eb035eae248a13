"""torchft's own tests, from its installed package, with our process group in place of its Gloo one.

`NOT_APPLICABLE` names every test of the two modules that is not run, with the reason; a test of torchft that is
neither run nor listed fails here.
"""

from __future__ import annotations

import re
import unittest
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

groups = pytest.importorskip("torchft.process_group_test", reason="torchft, or parameterized, is not installed (extra: dev)")
jobs = pytest.importorskip("torchft.manager_integ_test", reason="torchft, or parameterized, is not installed (extra: dev)")

from helixrt.collectives import ProcessGroupHelix  # noqa: E402, after the skips

_CUDA = "tests torchft's group over NCCL, which needs GPUs"
_BABY = "tests torchft's group in a subprocess (its pipes, processes and error texts)"
_THEIRS = "tests a class of torchft's that takes no process group of ours"
_COMMS = "needs torchcomms, another communication library"

NOT_APPLICABLE = {
    "ProcessGroupTest.test_gloo_apis_1_cuda": _CUDA,
    "ProcessGroupTest.test_nccl_apis": _CUDA,
    "ProcessGroupTest.test_nccl_timeouts": _CUDA,
    "ProcessGroupTest.test_nccl_init_timeout": _CUDA,
    "ProcessGroupTest.test_baby_nccl_apis": _CUDA,
    "ProcessGroupTest.test_baby_gloo_timeout": _BABY,
    "ProcessGroupTest.test_reconfigure_baby_process_group": _BABY,
    "ProcessGroupTest.test_baby_gloo_apis": _BABY,
    "ProcessGroupTest.test_dummy": _THEIRS,
    "ProcessGroupTest.test_process_group_wrapper": _THEIRS,
    "ProcessGroupTest.test_error_swallowing_process_group_wrapper": _THEIRS,
    "ProcessGroupTest.test_managed_process_group": _THEIRS,
    "CreateStoreClientTest": _THEIRS,
    "BabyGlooMultiPgTest": _BABY,
    "BabyNcclMultiPgTest": _CUDA,
    "NormalNcclMultiPgTest": _CUDA,
    "MultiPgBaseTest": "has no tests of its own",
    "ManagerIntegTest.test_manager_allreduce_0": _CUDA,
    "ManagerIntegTest.test_ddp_healthy_torchcomms": _COMMS,
    "ManagerIntegTest.test_ddp_recovery_torchcomms": _COMMS,
}
WHOLE = {"ProcessGroupTest", "NormalGlooMultiPgTest", "ManagerIntegTest"}  # classes whose other tests run here


def _tests(module: Any) -> Iterator[tuple[str, str]]:
    for name, kind in vars(module).items():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__:
            yield from ((name, test) for test in dir(kind) if test.startswith("test") and callable(getattr(kind, test)))


def _run(name: str) -> list[str]:
    """Labels of the tests of the class `name` that run here, the same in every process."""
    found = [test for kind, test in (*_tests(groups), *_tests(jobs)) if kind == name and f"{kind}.{test}" not in NOT_APPLICABLE]
    assert len({*map(_label, found)}) == len(found)
    return sorted(map(_label, found))


def _label(test: str) -> str:
    """torchft numbers the tests that it generates from a set, whose order is another in each process: leave that number out."""
    return re.sub(r"_\d+(?=_[a-z])", "", test)


@pytest.fixture(autouse=True)
def _ours_in_place_of_theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(ProcessGroupHelix(**settings))
        return made[-1]

    monkeypatch.setattr(groups, "ProcessGroupGloo", make)
    monkeypatch.setattr(jobs, "ProcessGroupGloo", make)
    yield
    for group in made:  # torchft's tests leave theirs behind
        group.shutdown()
    if dist.is_initialized():  # and the job's default group
        dist.destroy_process_group()


def _run_test(kind: type[unittest.TestCase], label: str) -> None:
    (test,) = (test for test in dir(kind) if _label(test) == label)
    result = unittest.TestResult()
    unittest.TestSuite([kind(test)]).run(result)
    for name in {"store", "pg_pool", "executor"} & vars(kind).keys():  # which setUpClass has made, and nobody drops
        delattr(kind, name)
    for _, trace in (*result.errors, *result.failures):
        pytest.fail(trace)
    assert not result.skipped, result.skipped
    assert result.testsRun == 1


def test_everything_of_theirs_is_run_or_listed_with_a_reason() -> None:
    theirs = {*_tests(groups), *_tests(jobs)}
    for kind, test in theirs:
        assert kind in WHOLE or kind in NOT_APPLICABLE or f"{kind}.{test}" in NOT_APPLICABLE, f"{kind}.{test} is new"
    names = {kind for kind, _ in theirs} | {f"{kind}.{test}" for kind, test in theirs} | {"MultiPgBaseTest"}
    assert not set(NOT_APPLICABLE) - names, "listed, and not there any more"


@pytest.mark.parametrize("test", _run("ProcessGroupTest"))
def test_process_group(test: str) -> None:
    _run_test(groups.ProcessGroupTest, test)


class OurGroups(groups.NormalGlooMultiPgTest):  # type: ignore[misc]
    __test__ = False  # run below, with a time limit for each

    @classmethod
    def _create_pg(cls, backend: str) -> Any:
        return ProcessGroupHelix(timeout=timedelta(seconds=10))

    def test_what_their_gloo_has_not(self) -> None:
        for collective in self.SKIP:
            self._run_parallel(collective)
        for collective in self.SKIP:
            self._run_with_resiliency(collective)


@pytest.mark.parametrize("test", ["test_what_their_gloo_has_not", *_run("NormalGlooMultiPgTest")])
def test_three_ranks(test: str) -> None:
    _run_test(OurGroups, test)


@pytest.mark.slow
@pytest.mark.parametrize("test", _run("ManagerIntegTest"))
def test_manager(test: str) -> None:
    _run_test(jobs.ManagerIntegTest, test)
