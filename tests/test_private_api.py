"""Adapters of private names: where the installed package has another shape, its own behaviour is used, and one line says so."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import helixrt
from helixrt import doctor, private_api
from helixrt.collectives import gloo_groups_private, gloo_private
from helixrt.compile import dynamo, fake_tensors_private, fake_world_private
from helixrt.doctor import State
from helixrt.engines import deepspeed_private, dtensor_private, fsdp_private
from helixrt.errors import ConfigError
from helixrt.job import dcp_private
from helixrt.job.checkpoint_layout import WholeTensor
from helixrt.job.stored_path import StoredPath
from helixrt.parallel import flash_private, ring_shift_private
from helixrt.passes import aot_private, group_private, inductor_private, triton_private
from helixrt.pipeline import pinned_private
from helixrt.pipeline.data_parallel import DataParallel
from helixrt.private_api import PrivatePart, package_of, parts
from helixrt.ray_cluster import placement_private
from helixrt.replica import lighthouse_beats_private, native_stacks_private

ADAPTERS = [path for folder in ("helixrt", "passes", "ray_cluster") for path in Path(folder).rglob("*_private.py")]


@pytest.fixture(autouse=True)
def _checked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", distributed_c10d.ProcessGroupGloo)  # taken back at the end
    _forget()
    yield
    _forget()


def _forget() -> None:
    private_api.lacking.cache_clear()
    private_api._told.clear()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized():
        dist.destroy_process_group()


def lose(part: PrivatePart, patch: pytest.MonkeyPatch) -> None:
    """As on a version in which the last of the part's names is gone."""
    unmet = private_api._unmet
    patch.setattr(private_api, "_unmet", lambda need: "has no such name" if need == part.needs[-1] else unmet(need))


# ---------------------------------------------------------------- where the package does the same in its own way


def gloo_groups(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    gloo_groups_private.bind_gloo("127.0.0.1")
    begin()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._threads == dist.ProcessGroupGloo._Options()._threads > gloo_groups_private.WORKERS
    made = gloo_groups_private.gloo_backend(dist.HashStore(), 0, 1)
    assert made.options._threads > gloo_groups_private.WORKERS


def gloo_exchange(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft")
    from torchft.process_group import ProcessGroupGloo

    device = gloo_private.GlooDevice("127.0.0.1")
    group = gloo_private.make_group(device, dist.HashStore(), 0, 1, 20.0, "r0")
    assert not device.known and type(group) is ProcessGroupGloo
    ones = torch.ones(3)
    group.allreduce([ones], dist.AllreduceOptions()).wait()
    assert ones.tolist() == [1.0, 1.0, 1.0]


def ring_shift(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    waited = []
    message = SimpleNamespace(wait=lambda: waited.append(True))
    patch.setattr(dist, "batch_isend_irecv", lambda messages: [message for _ in messages])
    with fake_world_private.fake_world(2):
        assert dist.group.WORLD is not None
        shifted = ring_shift_private._ring_shift(torch.ones(3), 1, dist.group.WORLD.group_name)
    assert shifted.shape == (3,) and waited == [True, True]


def flash(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    expected = flash_private.products(q, k, v, True)
    assert all(torch.equal(a, b) for a, b in zip(flash_private.attend(q, k, v, True), expected, strict=True))
    given = (torch.ones_like(q), q, k, v, *expected, True)
    found = flash_private.attend_backward(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, flash_private.products_backward(*given), strict=True))


def flash_cuda(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 2, 5, 8))
    assert not flash_private._fused_on_cuda(q)  # type: ignore[arg-type]


def fsdp_backward(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    begin()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dist.fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    used: list[torch.Tensor] = []
    end = fsdp_private.watch_used(model, used.append)
    model(torch.ones(1, 2)).sum().backward()
    assert {id(parameter) for parameter in used} == {id(parameter) for parameter in model.parameters()}
    end()
    model(torch.ones(1, 2)).sum().backward()
    assert len(used) == 4 and fsdp_private.reduces(model)


def pinned_cache(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch._C, "_host_emptyCache", None, raising=False)  # not called
    pinned_private.release_unused()


def native_stacks(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    patch.setenv(native_stacks_private.VARIABLE, "1")
    patch.setattr(torch._C, "_set_print_stack_traces_on_fatal_signal", None)  # not called
    native_stacks_private.tell_native_stacks()


def inductor_order(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    before = config.reorder_for_peak_memory
    inductor_private.keep_order()
    assert config.reorder_for_peak_memory == before


def triton_kernels(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    assert triton_private.kernel_text({"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1,)]}) == "kernel grid [(1,)]"


def torchft_native(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    coordination = pytest.importorskip("torchft.coordination")
    patch.setattr(lighthouse_beats_private, "_NAME", "_torchft_of_another_name")
    assert lighthouse_beats_private.library() == lighthouse_beats_private.native_module() == ""
    assert lighthouse_beats_private.server_class() is coordination.LighthouseServer
    lighthouse_beats_private.server_class()
    lighthouse_beats_private.beat_of("", "http://127.0.0.1:1", "r0", 0.05)()


def guards(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """A number that changes has no effect until the graphs are dropped."""
    model = nn.Dropout(0.0)
    model.scale = nn.Linear(2, 1)
    helixrt.compile(model.train(), loss=lambda output, target: (model.scale(output) * factor[0]).sum(), strict=True)
    factor = [1.0]
    x = torch.ones(2, 2)
    first = model.train_step(x, target=x)
    factor[0] = 2.0
    assert torch.equal(model.train_step(x, target=x), first)
    model.train_step.forget()
    assert torch.equal(model.train_step(x, target=x), 2 * first)


def ray_resources(begin: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    assert placement_private.resources() == ({}, {})


# ---------------------------------------------------------------- where nothing does the same


WHOLE = WholeTensor("float32", (1,), [((0,), (1,))], [dcp_private.Stored("file", 0, 4)])
REQUIRED: dict[str, Callable[[Path], object]] = {
    "NAMED_GROUPS": lambda tmp: group_private.group_named("0"),
    "STRIDED_SHARDS": lambda tmp: dtensor_private.strided_shard(0, 2),
    "STORED_PLACES": lambda tmp: dcp_private.write_metadata(tmp, {("x",): WHOLE}, {}),
    "STORAGE_FILES": lambda tmp: dcp_private.write_data(StoredPath("memory://private"), []),
    "CAPTURE": lambda tmp: aot_private.trace_joint(nn.Linear(1, 1), (torch.ones(1, 1),), nn.Linear(1, 1)),
    "FAKE_TENSORS": lambda tmp: fake_tensors_private.FakeWorld(torch.device("cpu")),
    "DDP_HALVES": lambda tmp: DataParallel(object.__new__(nn.parallel.DistributedDataParallel), nn.Linear(1, 1)).begin(Any),
    "FAKE_WORLD": lambda tmp: fake_world_private.fake_world(2).__enter__(),
    "DYNAMO_BACKEND": lambda tmp: dynamo.backend(torch.fx.symbolic_trace(nn.Linear(1, 1)), []),
    "INDUCTOR": lambda tmp: inductor_private.compiled(torch.fx.symbolic_trace(nn.Linear(1, 1)), []),
    "DEEPSPEED_PARTITIONS": lambda tmp: deepspeed_private.partitions_of(SimpleNamespace(optimizer=None), Any),
}
REPLACED = {
    "GLOO_GROUPS": gloo_groups,
    "GLOO_EXCHANGE": gloo_exchange,
    "RING_SHIFT": ring_shift,
    "FLASH": flash,
    "FLASH_CUDA": flash_cuda,
    "FSDP_BACKWARD": fsdp_backward,
    "GUARDS": guards,
    "PINNED_CACHE": pinned_cache,
    "NATIVE_STACKS": native_stacks,
    "INDUCTOR_ORDER": inductor_order,
    "TRITON_KERNELS": triton_kernels,
    "TORCHFT_NATIVE": torchft_native,
    "RAY_RESOURCES": ray_resources,
}


def test_every_part_has_a_case_and_every_adapter_a_part() -> None:
    assert {*REQUIRED, *REPLACED} == set(parts())
    of_transformers = {"transformers_private.py"}  # whose names are looked for where they are used
    without = [path.name for path in ADAPTERS if "helixrt.private_api" not in path.read_text()]
    assert set(without) == of_transformers and len(ADAPTERS) > 15


@pytest.mark.parametrize("name", REPLACED)
def test_the_packages_own_behaviour_is_used_and_one_line_says_what_is_lost(
    name: str, one_rank: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    part = parts()[name]
    if part.device and not private_api.built_for_device():
        pytest.skip("torch is built without CUDA and ROCm")
    lose(part, monkeypatch)
    REPLACED[name](one_rank, monkeypatch)
    (line,) = [record.getMessage() for record in caplog.records if record.name == private_api.__name__]
    package = package_of(part)
    assert line.startswith(f"{package} {importlib.metadata.version(package)} has ") and "\n" not in line
    assert part.lost in line and f"tested with {package} {', '.join(private_api.TESTED[package])}" in line


@pytest.mark.parametrize("name", REQUIRED)
def test_what_cannot_be_replaced_is_told_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    part = parts()[name]
    package = package_of(part)
    pytest.importorskip(package)
    lose(part, monkeypatch)
    with pytest.raises(ConfigError) as raised:
        REQUIRED[name](tmp_path)
    line = str(raised.value)
    assert line.startswith(f"{package}={importlib.metadata.version(package)}: has no such name") and "\n" not in line
    assert part.lost in line and "tested with" in line


@pytest.mark.parametrize("name", parts())
def test_this_version_has_every_name_and_a_missing_one_is_found(name: str) -> None:
    part = parts()[name]
    if part.device and not private_api.built_for_device():
        pytest.skip("torch is built without CUDA and ROCm")
    for need in part.needs:
        pytest.importorskip(need.partition(":")[0].partition(".")[0])
        assert private_api._unmet(need) == ""
        gone = re.sub(r"[\w.]+(\(|$)", r"nothing_of_this_name\1", need, count=1) if "(" in need else f"{need}_of_another_name"
        assert private_api._unmet(gone).startswith("has no ")


def test_other_parameters_are_found() -> None:
    for need, why in (
        ("shutil:copy(_, _)", ""),
        ("shutil:copy(_, _, follow_symlinks)", ""),
        ("shutil:copy(_, _, enable_reconfigure)", "enable_reconfigure"),
        ("shutil:copy(_)", "dst"),
        ("torch:ops.aten.relu.default(self)", ""),
        ("torch:ops.aten.relu.default(input)", "it takes self"),
        ("torch._C:_get_tracing_state()", ""),
    ):
        assert why in private_api._unmet(need) and bool(why) == bool(private_api._unmet(need)), need


# ---------------------------------------------------------------- calls of another shape


class LaterGloo:
    """torch's class as it might become: `window` is a keyword, and an option only where `optional`."""

    create_device = create_default_device = staticmethod(lambda **names: "device")
    optional = True

    class _Options:
        def __init__(self) -> None:
            if LaterGloo.optional:
                self.window = 0

    def __init__(self, store: object, rank: int, size: int, options: object = None, **others: object) -> None:
        self.options, self.others = options, others


@pytest.mark.parametrize("optional", [True, False])
def test_arguments_of_a_later_torch_reach_its_class(
    optional: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gloo_groups_private, "_Gloo", LaterGloo)
    monkeypatch.setattr(LaterGloo, "optional", optional)
    gloo_groups_private.one_gloo_worker()
    for _ in range(2):
        made = distributed_c10d.ProcessGroupGloo("store", 0, 1, timeout="limit", window=3)  # type: ignore[arg-type, call-arg]
    said = [record.getMessage() for record in caplog.records if record.name == private_api.__name__]
    if optional:
        assert (made.options.window, made.options._threads, made.options._timeout) == (3, 1, "limit") and not said
    else:
        assert made.others == {"timeout": "limit", "window": 3} and len(said) == 1 and "window" in said[0]


def test_doctor_lists_what_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.look_at_private_names().state is State.ON
    lose(private_api.FLASH, monkeypatch)
    _forget()
    finding = doctor.look_at_private_names()
    assert finding.state is State.WARN and private_api.FLASH.lost in finding.detail
    assert finding.fix == f"tested: torch {', '.join(private_api.TESTED['torch'])}"


OLD = (("torch", "2.12.0+cpu"), ("torchft", "0.1.1"), ("ray", "2.39.0"), ("deepspeed", "0.19.7"))


@pytest.mark.parametrize(("package", "version"), OLD)
def test_a_package_that_is_too_old_is_told_in_one_line(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    private_api.check_version(package)
    monkeypatch.setattr(private_api.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"^{package}={re.escape(version)}: must be [\d.]+ or newer; tested with .*$"):
        private_api.check_version(package)
    monkeypatch.setattr(private_api, "_old", set())
    monkeypatch.setenv("HELIXRT_ANY_VERSION", "1")
    private_api.check_version(package)
    private_api.check_version(package)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and f"{package}={version}" in said[0] and "wrong results are to be expected" in said[0]
