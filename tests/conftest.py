"""What tests of several folders share: what a marker needs of the machine, seeds, a group of stages."""

from __future__ import annotations

import functools
import importlib.util
import math
import multiprocessing.spawn
import os
import queue
import resource
import secrets
import shlex
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.core
import pytest
from hypothesis import HealthCheck, settings

from helixrt import doctor
from tests import leaks, programs
from tests.emulate.sweeps import SWEEP_SEEDS
from tests.vm_tests import Forwarder

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests start many processes on few cores
settings.register_profile(  # tests never assert time; where CI is set, Hypothesis's own profile draws no new numbers
    "helixrt",
    deadline=None,
    derandomize=False,
    print_blob=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("helixrt")

RunStages = Callable[..., list[Any]]
GRID_PARTS = 3  # a run of the tests draws one of so many cells of each grid
NEEDED = ("ray", "netns", "vm", "gpu", "notebook")  # markers of what a machine may lack; `Forwarder` looks after `rdma`
LONG = {*NEEDED, "rdma", "system", "smoke", "slow"}  # markers of what `make test` leaves out
LONGEST_S = 500  # of one test; at pyproject's faulthandler_timeout the whole run is ended


def pytest_configure(config: pytest.Config) -> None:
    """Started in the background or under nohup, a process has these ignored, and so would all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.option.seed is None:
        config.option.seed = getattr(config, "workerinput", {}).get("seed", secrets.randbelow(2**32))
    config.addinivalue_line("markers", "xdist_group(name): known also where pytest-xdist is not")
    hypothesis.core.global_force_seed = config.option.seed
    options = (f"--seed={config.option.seed}",)
    config.pluginmanager.register(Forwarder(options), "lab")  # tests marked rdma run in the VM lab
    leaks.watch(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tests distributed over worker processes (pytest-xdist) draw from the seed of the one run."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="all that this run draws at random follows from this number; new by default")
    parser.addoption("--seeds", type=int, default=1_250, help="seeds of each simulated world in the slow tests")
    parser.addoption("--whole", action="store_true", help="all cells of the tests marked grid, not the third that is drawn")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sweep_part" in metafunc.fixturenames:
        metafunc.parametrize("sweep_part", range(max(1, metafunc.config.option.seeds // SWEEP_SEEDS)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, of whatever scope: skip what this machine cannot run, with the reason. In CI a missing Ray,
    namespace or VM is a failure. A limit that is too high fails here, because with several workers the test's own report shows
    it and an error of the collection would not."""
    for marker in NEEDED:
        if item.get_closest_marker(marker) is None or not (reason := lacking(marker)):
            continue
        if os.environ.get("CI") == "true" and marker != "gpu":
            pytest.fail(f"CI must run tests marked {marker}, but {reason}", pytrace=False)
        pytest.skip(reason)
    marks = {mark.name for mark in item.iter_markers()}
    programs.forks = "smoke" not in marks
    programs.refused = "a test of `make test` may start no program or rank: mark it `system`" if LONG.isdisjoint(marks) else ""
    limit = item.get_closest_marker("timeout")
    if limit is not None and limit.args[0] > LONGEST_S:
        pytest.fail(f"a limit of {limit.args[0]} s: cut the test, {LONGEST_S} s is the most", pytrace=False)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and group those that one worker process must run (pytest-xdist, `--dist loadgroup`).

    In one process, programs in the VM come behind the guest's pytest, which runs beside the tests out here, and tests that
    need Ray come last. With several workers, what needs the VM comes first: its worker waits for the guest while the others
    compute. Tests that need Ray come late, because its head then runs to the end and uses processor time. They do not come
    last, because one worker runs all of them, and the others need work meanwhile.
    """
    _draw(config, items)
    for item in items:
        if group := group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
    parts: dict[str, list[pytest.Item]] = {"rdma": [], "vm": [], "ray": [], "": []}
    for item in items:
        parts[next((mark.name for mark in item.iter_markers() if mark.name in parts), "")].append(item)
    rest = parts[""]
    if hasattr(config, "workerinput"):
        late = len(rest) * 3 // 4
        items[:] = [*parts["rdma"], *parts["vm"], *rest[:late], *parts["ray"], *rest[late:]]
    else:
        items[:] = [*rest, *parts["rdma"], *parts["vm"], *parts["ray"]]


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cells of each test marked grid that the same target runs a third, and at least one; other ones with each seed of
    a run. All with `--whole`, or where tests are named."""
    chosen = [config.option.keyword, *(getattr(config.option, name, False) for name in ("lf", "failedfirst"))]
    if config.option.whole or any(chosen) or any("::" in argument for argument in config.args):
        return
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("grid") is not None:
            target = sorted({mark.name for mark in item.iter_markers()} & LONG)
            grids.setdefault(f"{item.nodeid.partition('[')[0]} {target}", []).append(item)
    left_out: list[pytest.Item] = []
    for cells in grids.values():
        cells.sort(key=lambda item: zlib.crc32(f"{config.option.seed} {item.nodeid}".encode()))
        left_out += cells[math.ceil(len(cells) / GRID_PARTS) :]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def group_of(item: pytest.Item) -> str:
    """Tests of one group run in one process: those that share the VM, the Ray head, or a fixture of their module.

    Empty for a test that shares nothing.
    """
    for mark, group in (("rdma", "vm"), ("vm", "vm"), ("ray", "ray")):
        if item.get_closest_marker(mark) is not None:
            return group
    fixtures: dict[str, Any] = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    shared = any(found.scope in ("module", "package") for defined in fixtures.values() for found in defined)
    return item.path.stem if shared else ""


def node_of(item: pytest.Item) -> str:
    """The test's name for pytest's command line: pytest-xdist appends the group to `nodeid`."""
    return item.nodeid.removesuffix(f"@{group_of(item)}")


def pytest_report_header(config: pytest.Config) -> str:
    drawn = "" if config.option.whole else f"; of grids one cell of {GRID_PARTS} is drawn (all: --whole)"
    return f"seed of this run: {config.option.seed} (the same numbers again: --seed {config.option.seed}){drawn}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What failed says how to draw the same numbers again."""
    report = yield
    if report.failed:
        report.sections.append(("seed", f"replay: pytest {shlex.quote(node_of(item))} --seed {item.config.option.seed}"))
    return report


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


@pytest.fixture(autouse=True)
def _engines_are_closed() -> Iterator[None]:
    """Parameters hold an engine that is not closed, in a cycle through native code."""
    yield
    world = sys.modules.get("tests.job.session_world")
    while world is not None and world.OPENED:
        world.OPENED.pop().close()


@functools.cache
def lacking(marker: str) -> str:
    """Why this machine cannot run tests with `marker`; empty when it can."""
    if marker == "ray":
        finding = next(doctor.look_at_package(package) for package in doctor.PACKAGES if package.distribution == "ray")
    elif marker == "netns":
        finding = doctor.look_at_namespaces()
    elif marker == "vm":
        finding = doctor.look_at_lab()
    elif marker == "gpu":
        finding = doctor.look_at_accelerator()
    elif marker == "notebook":
        return "" if importlib.util.find_spec("nbclient") else "nbclient is missing: pip install 'helixrt[notebooks]'"
    else:
        return ""
    return "" if finding.works else f"{finding.name}: {finding.detail} -> {finding.fix}"


@dataclass(frozen=True)
class RayHead:
    """Of the tests: `dashboard` is for job submission; its workers can import what lies in the folder `programs`."""

    dashboard: str
    programs: Path


@contextmanager
def _nothing_inherited_changes() -> Iterator[None]:
    """Undo what a block changes of what later programs inherit from this process. `ray.init` sets PYTHONBREAKPOINT and raises
    the limit of open files; with either, no later program of this process would be forked (`programs`)."""
    before, limits = dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        for name in [name for name in set(os.environ) - set(before) if not name.startswith("RAY_")]:  # those are Ray's own
            del os.environ[name]
        os.environ.update(before)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """One Ray head for all tests that need one, with this process connected to it: it takes long to start and to end."""
    import ray

    from helixrt.ray_cluster.head import local_head, marked

    programs = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(programs))
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_worker_niceness", "0")  # by default 15: ranks would starve beside the other tests
        with local_head(4) as head:
            # "auto", for only then does Ray pick up the token in a process that has imported it before.
            with _nothing_inherited_changes():
                ray.init(address="auto", _temp_dir=str(head.folder), log_to_driver=False, logging_level="ERROR")
            yield RayHead(head.dashboard, programs)
            ray.shutdown()
        assert marked(head.mark) == []


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, that follows from the run's (`--seed`) and the test's name."""
    value = zlib.crc32(f"{request.config.option.seed} {node_of(request.node)}".encode())
    print(f"seed {value}")
    return value


@pytest.fixture
def one_thread() -> None:
    """One thread of torch, and the same random numbers in every run."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def run_stages(monkeypatch: pytest.MonkeyPatch) -> RunStages:
    """`run_stages(n, fn)` calls fn(stage, group) on n threads, each a rank of one Gloo group; gives their results.

    The group is real (loopback sockets); only processes are spared. The first error is raised here.
    """
    import torch
    import torch.distributed as dist

    from helixrt.collectives.gloo_groups_private import gloo_backend

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)

    def run(stages: int, fn: Callable[[int, Any], Any], timeout_s: float = 60.0) -> list[Any]:
        store = dist.HashStore()
        results: list[Any] = [None] * stages
        errors: list[BaseException] = []

        def body(stage: int) -> None:
            try:
                group = gloo_backend(store, stage, stages, timedelta(seconds=timeout_s))
                results[stage] = fn(stage, group)
            except BaseException as error:  # handed to the test's thread
                errors.append(error)

        threads = [threading.Thread(target=body, args=(s,), name=f"stage-{s}", daemon=True) for s in range(stages)]
        for thread in threads:
            thread.start()
        ends_s = time.monotonic() + 4 * timeout_s
        while any(thread.is_alive() for thread in threads) and not errors and time.monotonic() < ends_s:
            for thread in threads:
                thread.join(0.1)
        if errors:  # the others may wait for that stage until their own limit
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a stage did not end in time"
        return results

    return run


_captured: tuple[str, dict[Any, Any], dict[Any, Any]] = ("", {}, {})  # of the test module that this process runs


@pytest.fixture
def captured_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tests of one module, chunks of pipelines that are alike get the same graphs: capture takes longer than all the
    rest."""
    global _captured
    import torch

    from helixrt.pipeline import graph_stage

    if _captured[0] != request.module.__name__:
        _captured = (request.module.__name__, {}, {})
    capture, split, lock, (_, known, halves) = graph_stage.capture, graph_stage.ChunkGraphs, threading.Lock(), _captured

    def once(module: Any, args: Any, *, loss: Any, target: Any) -> Any:
        state = [(name, tensor.shape, tensor.dtype) for name, tensor in (*module.named_parameters(), *module.named_buffers())]
        ambient = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), module.training)
        key = (repr(module), type(module), tuple(state), args[0].shape, args[0].dtype, args[0].requires_grad, loss, ambient)
        with lock:
            if key not in known:
                known[key] = capture(module, args, loss=loss, target=target)
            return known[key]

    def split_once(joint: Any) -> Any:
        key = (joint.module, joint.inputs)  # the ports say which chunk it is
        with lock:
            if key not in halves:
                halves[key] = split(joint)
            return halves[key]

    monkeypatch.setattr(graph_stage, "capture", once)
    monkeypatch.setattr(graph_stage, "ChunkGraphs", split_once)


@pytest.fixture(scope="session")
def plain_engine() -> Any:
    """The class in tests/plain_engine.py (tests are not a package, so they cannot import it)."""
    spec = importlib.util.spec_from_file_location("plain_engine", Path(__file__).with_name("plain_engine.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PlainEngine


RANKS, ANSWER_DEADLINE_S = 2, 240


class RankAnswers:
    """What all ranks say of each case, in turn: nothing, or a traceback, after which they are asked no more.

    They go on by themselves; a test waits for no more than its own case.
    """

    def __init__(self, names: Iterable[str], answers: Any, ranks: int = RANKS) -> None:
        self._ranks = ranks
        self.said: dict[str, list[str]] = {name: [] for name in names}
        self.answers = answers

    def check(self, name: str) -> None:
        """Fails unless all ranks come through this case."""
        while len(self.said[name]) < self._ranks:
            for other, said in self.said.items():
                for problem in filter(None, said):
                    pytest.fail(f"case {other!r}: {problem}", pytrace=False)
            try:
                _, about, problem = self.answers.get(timeout=ANSWER_DEADLINE_S)
            except queue.Empty:
                self.said[name].append("a rank did not answer")
            else:
                self.said[about].append(problem)
        for problem in filter(None, self.said[name]):
            pytest.fail(f"case {name!r}: {problem}", pytrace=False)


def rank_main(rank: int, ranks: int, folder: str, check: Callable[[str], None], names: list[str], answers: Any) -> None:
    """One of the processes of a Gloo group; see `ask_ranks`."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HELIXRT_CACHE": f"{folder}/cache{rank}"}
    import torch
    import torch.distributed as dist

    from helixrt.collectives.gloo_groups_private import one_gloo_worker

    torch.set_num_threads(1)
    one_gloo_worker()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    try:
        for name in names:
            try:
                check(name)
                answers.put((rank, name, ""))
            except BaseException:
                answers.put((rank, name, f"rank {rank}: {traceback.format_exc()}"))
                return  # the other rank may wait in vain; it says so by its deadline
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ask_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RankAnswers]]:
    """`ask_ranks(check, names)`: two processes that are ranks (or `ranks`) call `check(name)`, of a test's module, for each
    name in turn.

    The same processes for many cases: what they import takes seconds.
    """
    from tests.ranks_context import ranks_context

    processes: list[Any] = []

    def ask(check: Callable[[str], None], names: Iterable[str], ranks: int = RANKS) -> RankAnswers:
        names = list(names)
        folder = str(tmp_path_factory.mktemp("ranks"))
        context = ranks_context()
        said = context.Queue()
        for rank in range(ranks):
            arguments = (rank, ranks, folder, check, names, said)
            processes.append(context.Process(target=rank_main, args=arguments, name=f"rank-{rank}"))
            processes[-1].start()
        return RankAnswers(names, said, ranks)

    yield ask
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
