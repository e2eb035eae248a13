"""Which private names of torch and other packages helixrt uses, and whether the installed versions have them.

In: a `PrivatePart`, the names that one adapter (`*_private.py`) needs. Out: whether all of them are there, checked once per
process at the first use. Where one is missing, an adapter has two ways. `usable` logs one line that says what is lost, and the
adapter leaves the public behaviour of the package in place. `require` raises ConfigError, where there is no such behaviour.

Only the standard library is imported here; a check imports what it looks at.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from helixrt.errors import ConfigError

LEAST = {"torch": (2, 13), "torchft": (0, 2), "ray": (2, 40), "deepspeed": (0, 19, 8)}  # the oldest versions that work
TESTED = {
    "torch": ("2.13.0", "2.14.1", "2.15.0"),
    "torchft": ("0.2.0",),
    "ray": ("2.59.0", "2.60.0"),
    "deepspeed": ("0.19.8",),
}
VARIABLE = "HELIXRT_ANY_VERSION"  # "1": a version that is too old causes a warning, and no error
_NEED = re.compile(r"(?P<module>[\w.]+):(?P<path>[\w.]+)(?:\((?P<parameters>[\w, ]*)\))?")
_told: set[PrivatePart] = set()  # whose line this process has logged
_old: set[str] = set()  # packages of which the log says that they are too old
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivatePart:
    """`needs`: MODULE:NAME or MODULE:NAME(ARGUMENTS), where NAME may have dots and an argument is a keyword, or `_` by
    position. `lost`: what is missing without them. `device`: only a torch that is built for CUDA or ROCm has them.
    """

    lost: str
    needs: tuple[str, ...]
    device: bool = False


_C10D = "torch.distributed.distributed_c10d:"
_GLOO = tuple(f"{_C10D}ProcessGroupGloo.{name}" for name in ("_Options._threads", "_Options._devices", "_Options._timeout"))
_AOT = "torch._functorch._aot_autograd.descriptors:"
_AOT_ENDS = ("PlainAOT{}", "SubclassGetAttrAOT{}")
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_FLASH_CUDA = "_scaled_dot_product_flash_attention"

GLOO_GROUPS = PrivatePart(
    "one worker thread for each Gloo group, on the address of this rank (torch's own two can corrupt memory)",
    (*_GLOO, f"{_C10D}ProcessGroupGloo.create_device", f"{_C10D}ProcessGroupGloo.create_default_device"),
)
GLOO_EXCHANGE = PrivatePart(
    "the early end of an all-reduce whose peer is lost, with exchange=gloo (it ends at its timeout)",
    (
        *_GLOO,
        f"{_C10D}ProcessGroupGloo.create_device",
        "torch.distributed:ProcessGroup._set_default_backend",
        "torch.distributed:ProcessGroup._register_backend",
        "torch.distributed:ProcessGroup.BackendType.GLOO",
        "torchft.process_group:ProcessGroupGloo._create_pg(_, _, _, _)",
    ),
)
NAMED_GROUPS = PrivatePart("process groups in captured graphs", (f"{_C10D}_resolve_process_group(_)",))
RING_SHIFT = PrivatePart(
    "overlap of the messages of ring attention with its compute",
    (
        "torch._C._distributed_c10d:_register_work",
        "torch.distributed:ProcessGroup._get_backend",
        "torch.distributed:ProcessGroup._start_coalescing",
        "torch.distributed:ProcessGroup._end_coalescing",
    ),
)
FLASH = PrivatePart(
    "fused attention in ring attention on the processor (products of matrices hold all scores at once)",
    (
        f"torch:ops.aten.{_FLASH}.default(query, key, value, dropout_p, is_causal)",
        f"torch:ops.aten.{_FLASH}_backward.default(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal)",
    ),
)
FLASH_CUDA = PrivatePart(
    "fused attention in ring attention on CUDA (products of matrices hold all scores at once)",
    (
        f"torch:ops.aten.{_FLASH_CUDA}.default(query, key, value, dropout_p, is_causal)",
        f"torch:ops.aten.{_FLASH_CUDA}_backward.default(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, "
        "max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset)",
    ),
)
FSDP_BACKWARD = PrivatePart(
    "which parameters a backward left without gradient, with dp_shard (all count as used)",
    (
        "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward",
    ),
)
DDP_HALVES = PrivatePart(
    "train_step of a model that DistributedDataParallel wraps",
    (
        "torch.nn.parallel:DistributedDataParallel._pre_forward(_)",
        "torch.nn.parallel:DistributedDataParallel._post_forward(_, _)",
    ),
)
STRIDED_SHARDS = PrivatePart(
    "dp_shard together with tp, and weights that pack several matrices with tp",
    ("torch.distributed.tensor.placement_types:_StridedShard(_, split_factor)",),
)
PINNED_CACHE = PrivatePart("release of unused pinned memory to the system", ("torch:_C._host_emptyCache",), device=True)
NATIVE_STACKS = PrivatePart(
    "native stacks of a rank that ends in native code, which HELIXRT_NATIVE_STACKS=1 asks for",
    ("torch:_C._set_print_stack_traces_on_fatal_signal",),
)
STORED_PLACES = PrivatePart(
    "checkpoints in the format of torch.distributed.checkpoint",
    (
        "torch.distributed.checkpoint.filesystem:_StorageInfo(_, _, _)",
        "torch.distributed.checkpoint.planner_helpers:create_read_items_for_chunk_list(_, _, _)",
    ),
)
STORAGE_FILES = PrivatePart(
    "checkpoints in a storage",
    (
        "torch.distributed.checkpoint._fsspec_filesystem:FsspecWriter(_, sync_files)",
        "torch.distributed.checkpoint._fsspec_filesystem:FsspecReader(_)",
    ),
)
CAPTURE = PrivatePart(
    "capture of a model (helixrt.compile, strands, pp and cp of an unmodified model)",
    (
        "torch._dynamo:config.patch",
        "torch._dynamo:exc.TorchDynamoException",
        "torch._dynamo.output_graph:OutputGraph",
        "torch._dynamo.functional_export:dynamo_graph_capture_for_export(_)",
        "torch._functorch.aot_autograd:aot_export_joint_with_descriptors(_, _, _, _)",
        "torch._functorch:config.patch",
        "torch._guards:tracing(_)",
        "torch.fx.experimental.symbolic_shapes:GuardOnDataDependentSymNode",
        *(f"{_AOT}{name.format(end)}" for end in ("Input", "Output") for name in _AOT_ENDS),
        *(f"{_AOT}{name}AOTInput" for name in ("Param", "Buffer", "Tangent", "SubclassSize", "SubclassStride")),
        *(f"{_AOT}{name}AOTOutput" for name in ("InputMutation", "Grad", "IntermediateBase")),
    ),
)
GUARDS = PrivatePart(
    "notice of Python values that changed after a capture (call `model.train_step.forget()` after a change)",
    (
        "torch._guards:GuardsSet(_)",
        "torch.utils._ordered_set:OrderedSet(_)",
        "torch._dynamo.functional_export:DynamoBytecodeFlatten",
        "torch._dynamo.output_graph:OutputGraphCommon.dump_guards_state(_)",
        "torch._dynamo.guards:CheckFunctionManager(_, _)",
    ),
)
FAKE_TENSORS = PrivatePart(
    "capture of a model (its tensors without memory)",
    ("torch._subclasses.fake_tensor:FakeTensor", "torch._subclasses.fake_tensor:FakeTensorMode"),
)
FAKE_WORLD = PrivatePart(
    "capture for ranks that are not there (helixrt strands --ranks)",
    ("torch.testing._internal.distributed.fake_pg:FakeStore",),
)
DYNAMO_BACKEND = PrivatePart('torch.compile(backend="helixrt")', ("torch._dynamo.backends.common:aot_autograd",))
INDUCTOR = PrivatePart('codegen="inductor"; codegen="eager" works', ("torch._inductor:compile(_, _)",))
INDUCTOR_ORDER = PrivatePart(
    "the order of a pass in graphs of DeepCompile with Inductor", ("torch._inductor:config.reorder_for_peak_memory",)
)
TRITON_KERNELS = PrivatePart(
    "the difference between kernels of Triton in captured graphs, where ranks compare theirs",
    (
        "torch._higher_order_ops.triton_kernel_wrap:kernel_side_table.get_kernel(_)",
        "torch._higher_order_ops.triton_kernel_wrap:kernel_side_table.get_constant_args(_)",
    ),
)
TORCHFT_NATIVE = PrivatePart(
    "a lighthouse and heartbeats without the import of torch (their processes start slower and are larger)",
    ("torchft:_torchft.LighthouseServer", "torchft:_torchft.LighthouseClient"),
)
DEEPSPEED_PARTITIONS = PrivatePart(
    "session.deepspeed",
    (
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    ),
)
RAY_RESOURCES = PrivatePart(
    "placement of a replica's ranks on one node where one has room (Ray packs them on few nodes)",
    (
        "ray._private.state:total_resources_per_node",
        "ray._private.state:available_resources_per_node",
        "ray.util.placement_group:placement_group(_, strategy, name, _soft_target_node_id)",
    ),
)


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0). Empty when there are none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_version(package: str) -> None:
    """Raises ConfigError for a version that is too old; with HELIXRT_ANY_VERSION=1 the log says once what may happen. A package
    without metadata passes, such as a folder on the path."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    if (found := parse_version(version)) and found < LEAST[package]:
        least = ".".join(map(str, LEAST[package]))
        error = ConfigError(package, version, f"must be {least} or newer; {_tested(package)}")
        if os.environ.get(VARIABLE) != "1":
            raise error
        if package not in _old:
            _old.add(package)
            _log.warning("%s. It runs on because of %s=1: errors and wrong results are to be expected", error, VARIABLE)


def parts() -> dict[str, PrivatePart]:
    """All of them, by name."""
    return {name: value for name, value in globals().items() if isinstance(value, PrivatePart)}


def package_of(part: PrivatePart) -> str:
    """The package whose version decides: that of the last need."""
    return part.needs[-1].partition(":")[0].partition(".")[0]


@functools.cache
def lacking(part: PrivatePart) -> str:
    """The first need that the installed packages do not meet; empty when all are met, or none applies. Checked once."""
    if part.device and not built_for_device():
        return ""
    return next((why for need in part.needs if (why := _unmet(need))), "")


def built_for_device() -> bool:
    """Whether torch is built for CUDA or ROCm."""
    import torch

    return bool(torch.version.cuda or torch.version.hip)


def lacking_of(package: str) -> dict[str, str]:
    """What is lost with the installed version of a package, and why."""
    return {part.lost: why for part in parts().values() if package_of(part) == package and (why := lacking(part))}


def usable(part: PrivatePart) -> bool:
    """Whether the adapter may use its private names. The first False in a process is logged in one line."""
    if why := lacking(part):
        tell_once(part, why)
    return not why


def require(part: PrivatePart) -> None:
    """Raises ConfigError, where the package has no public behaviour that does the same."""
    if why := lacking(part):
        raise unusable(part, why)


def unusable(part: PrivatePart, why: object) -> ConfigError:
    """One line: the version here, what is missing in it, what needs it, and the versions that were tested."""
    package = package_of(part)
    return ConfigError(package, _version(package), f"{_line(why)}, which is needed for {part.lost}; {_tested(package)}")


def tell_once(part: PrivatePart, why: object) -> None:
    """Log what is lost, once for each part; also for a lack that shows in a call alone."""
    if part in _told:
        return
    _told.add(part)
    package = package_of(part)
    _log.warning("%s %s %s; lost: %s; %s", package, _version(package), _line(why), part.lost, _tested(package))


def _line(why: object) -> str:
    if isinstance(why, BaseException):
        why = f"has another interface ({type(why).__name__}: {why})"
    return " ".join(str(why).split())


def _tested(package: str) -> str:
    return f"tested with {package} {', '.join(TESTED[package])}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a folder on the import path
        return "of unknown version"


def _unmet(need: str) -> str:
    match = _NEED.fullmatch(need)
    assert match is not None, need
    try:
        found: Any = importlib.import_module(match["module"])
        for name in match["path"].split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return f"has no {match['module']}.{match['path']}"
    if match["parameters"] is None:
        return ""
    why = _unfit(found, [name.strip() for name in match["parameters"].split(",") if name.strip()])
    return f"has another {match['module']}.{match['path']}: {why}" if why else ""


def _unfit(called: Any, given: list[str]) -> str:
    """Why it cannot be called with these arguments, those by position called `_`; empty where nothing is known of it."""
    if (schema := getattr(called, "_schema", None)) is not None:  # an operator of torch
        names = [argument.name for argument in schema.arguments]
        return "" if names[: len(given)] == given else f"it takes {', '.join(names)}"
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # native code
        return ""
    try:
        signature.bind(*(name for name in given if name == "_"), **{name: None for name in given if name != "_"})
    except TypeError as error:
        return str(error)
    return ""
