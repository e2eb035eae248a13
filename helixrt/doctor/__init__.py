"""`helixrt doctor`: what is on and what is off on this machine, why, and how to fix it.

In: the running interpreter and machine. Out: a list of `Finding`s, as aligned text or JSON, and an
exit code: 0 when the main job can run (`python -m helixrt.train`), 1 when it cannot. Ray is needed
only to run it as a Ray job, as the last lines of the output explain. Versions come from package metadata; only
torch and torchft are imported, because a build that cannot be imported must be reported.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, util

from helixrt.doctor.findings import Finding, Need, State
from helixrt.doctor.import_paths import look_at_import_paths
from helixrt.errors import ConfigError
from helixrt.lab import vm_setup
from helixrt.lab.machine import Lack, lacking
from helixrt.private_api import LEAST, TESTED, lacking_of, parse_version
from helixrt.transport.verbs import devices as verbs_devices
from helixrt.transport.verbs import library as verbs_library

PYTHON = (3, 11)
RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard and jobs"}


@dataclass(frozen=True)
class Package:
    """An installed package that a part of helixrt needs: from which version, and which extra brings it.

    `modules` must be findable too: they distinguish a complete installation from a partial one. `load` is imported.
    """

    distribution: str
    at_least: tuple[int, ...]
    gives: str
    extra: str = ""
    needed_for: Need = Need.NOTHING
    modules: tuple[str, ...] = ()
    load: str = ""


PACKAGES = (
    Package("torch", LEAST["torch"], "tensors, gradients, process groups", needed_for=Need.JOB, load="torch"),
    Package("numpy", (1, 26), "arrays", needed_for=Need.JOB, modules=("numpy",)),
    Package("hydra-core", (1, 3), "settings of the built-in job", "train", Need.JOB, ("hydra", "omegaconf")),
    Package("torchft", LEAST["torchft"], "membership by a lighthouse", "ft", modules=("torchft",), load="torchft.coordination"),
    Package("torchdata", (0, 11), "the loader and its position", "ft", Need.JOB, ("torchdata.stateful_dataloader",)),
    Package("tensorboard", (2,), "TensorBoard files", "train", modules=("tensorboard",)),
    Package("matplotlib", (3,), "PNG pictures", "train", modules=("matplotlib",)),
    Package("tqdm", (4,), "the progress bar", "train", modules=("tqdm",)),
    Package("ray", LEAST["ray"], "jobs and actors on a cluster", "ray", Need.RAY_JOB, ("ray", "aiohttp", "opencensus")),
    Package("deepspeed", LEAST["deepspeed"], "ZeRO inside a replica: session.deepspeed", "deepspeed", modules=("deepspeed",)),
)


# ---- decisions ---------------------------------------------------------------------------------


def install_hint(extra: str) -> str:
    return f"pip install 'helixrt[{extra}]'" if extra else "pip install helixrt"


def python_finding(version: tuple[int, ...], executable: str) -> Finding:
    """Whether the interpreter is new enough."""
    text = ".".join(map(str, version[:3]))
    if version[:2] < PYTHON:
        return Finding("python", State.BAD, f"{text} at {executable}", "install Python 3.11 or newer", Need.JOB)
    return Finding("python", State.ON, f"{text} at {executable}", needed_for=Need.JOB)


def package_finding(package: Package, version: str | None, missing_modules: Sequence[str], load_error: str) -> Finding:
    """What a package's version, its missing modules and its failed import mean."""
    fix = install_hint(package.extra)
    absent = State.BAD if package.needed_for is Need.JOB else State.OFF

    def finding(state: State, detail: str, fix: str = "") -> Finding:
        return Finding(package.distribution, state, detail, fix, package.needed_for)

    if version is None:
        return finding(absent, f"not installed ({package.gives})", fix)
    if parse_version(version) < package.at_least:
        wanted = ".".join(map(str, package.at_least))
        return finding(State.BAD, f"{version} is older than {wanted} ({package.gives})", fix)
    if missing_modules:
        return finding(State.BAD, f"{version}, but without {', '.join(missing_modules)} ({package.gives})", fix)
    if load_error:
        return finding(State.BAD, f"{version} does not load: {load_error}", fix)
    return finding(State.ON, f"{version} ({package.gives})")


def triton_finding(version: str | None, declared: str | None, accelerator: bool) -> Finding:
    """Triton against the version torch declares (None where torch declares none, as CPU builds do)."""
    if version is None:
        why = "not installed; CPU tensors use the plain PyTorch oracles"
        return Finding("triton", State.OFF, why, f"pip install triton{f'=={declared}' if declared else ''}")
    if declared and parse_version(version)[:2] != parse_version(declared)[:2]:
        return Finding("triton", State.WARN, f"{version}, while torch declares {declared}", f"pip install triton=={declared}")
    where = "on the device" if accelerator else "through its interpreter only: no device"
    return Finding("triton", State.ON, f"{version}, {where}")


def ports_finding(bind_error: str, taken: Sequence[int], ray_address: str) -> Finding:
    """Whether loopback gives free ports, and whether a Ray head already sits on its usual ones."""
    if bind_error:
        fix = "bring the loopback interface up: ip link set lo up"
        return Finding("ports", State.BAD, f"cannot bind a port on 127.0.0.1: {bind_error}", fix, Need.JOB)
    if taken and not ray_address:
        used = ", ".join(f"{port} ({RAY_PORTS[port]})" for port in taken)
        fix = "set RAY_ADDRESS to use the cluster that is running, or end it: ray stop"
        return Finding("ports", State.WARN, f"free ones on 127.0.0.1; in use: {used}", fix, Need.JOB)
    return Finding("ports", State.ON, "free ones on 127.0.0.1", needed_for=Need.JOB)


def namespaces_finding(lack: Lack | None) -> Finding:
    """Network namespaces with rated links: only the lab and tests marked `netns` use them."""
    if lack is not None:
        return Finding("namespaces", State.OFF, lack.what, lack.fix)
    return Finding("namespaces", State.ON, "root, and a kernel with veth, bridge and tbf")


def rdma_finding(pyverbs: bool, devices: Sequence[str]) -> Finding:
    """The verbs transport needs both pyverbs and a device."""
    if not devices:
        fix = "needs an RDMA NIC, or Soft-RoCE: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
        return Finding("rdma", State.OFF, "no device under /sys/class/infiniband" + ("" if pyverbs else ", no pyverbs"), fix)
    if not pyverbs:
        fix = "apt-get install python3-pyverbs rdma-core, or pip install 'helixrt[rdma]'"
        return Finding("rdma", State.OFF, f"{', '.join(devices)}, but pyverbs is not installed", fix)
    return Finding("rdma", State.ON, f"pyverbs, {', '.join(devices)}")


def lab_finding(lack: Lack | None, kernel: str) -> Finding:
    """The VM with Soft-RoCE NICs: only `helixrt lab run` and tests marked `rdma` or `vm` use it."""
    if lack is not None:
        return Finding("rdma lab", State.OFF, lack.what, lack.fix)
    return Finding("rdma lab", State.ON, f"QEMU, kernel {kernel}")


def can_run(findings: Iterable[Finding], what: Need) -> bool:
    """Whether the main job can run in local processes (`JOB`) or also on Ray (`RAY_JOB`)."""
    wanted = {Need.JOB, what}
    return all(finding.works for finding in findings if finding.needed_for in wanted)


# ---- looking at the machine --------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _findable(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def look_at_package(package: Package) -> Finding:
    version = _version(package.distribution)
    if version is None:
        return package_finding(package, None, (), "")
    missing = [module for module in package.modules if not _findable(module)]
    error = ""
    if package.load and not missing:
        try:
            import_module(package.load)
        except Exception as failure:  # whatever a broken build raises is the finding
            error = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    return package_finding(package, version, missing, error)


def look_at_accelerator() -> Finding:
    try:
        import torch
    except Exception:
        return Finding("accelerator", State.OFF, "torch does not load", "see torch above")
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        count = torch.accelerator.device_count()
        name = torch.cuda.get_device_name(0) if device.type == "cuda" else device.type
        return Finding("accelerator", State.ON, f"{count} x {name}")
    if built := torch.version.cuda or torch.version.hip:
        why, fix = f"torch is built for {built}, but sees no device; CPU tensors are used", "check the driver: nvidia-smi"
    else:
        why, fix = "CPU build of torch; CPU tensors are used", "install a CUDA or ROCm build of torch"
    return Finding("accelerator", State.OFF, why, fix)


def declared_triton() -> str | None:
    """The version of triton that the installed torch names in its metadata."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"(?:pytorch-)?triton==([\w.]+)", requirement.replace(" ", ""))
        if match:
            return match.group(1)
    return None


def look_at_private_names() -> Finding:
    """What of helixrt does not work, or works otherwise, because this torch has other private names."""
    lost = lacking_of("torch")
    if not lost:
        return Finding("torch names", State.ON, "has all private ones that helixrt uses")
    detail = "; ".join(f"{why}, lost: {what}" for what, why in lost.items())
    return Finding("torch names", State.WARN, detail, f"tested: torch {', '.join(TESTED['torch'])}")


def look_at_ports() -> Finding:
    error, taken = "", []
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
            pass
    except OSError as failure:
        error = str(failure)
    for port in RAY_PORTS:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    return ports_finding(error, taken, os.environ.get("RAY_ADDRESS", ""))


def look_at_namespaces() -> Finding:
    return namespaces_finding(lacking())


def look_at_rdma() -> Finding:
    try:
        verbs_library.library()
    except ConfigError:
        found = False
    else:
        found = True
    return rdma_finding(found, [str(port) for port in verbs_devices.survey()])


def look_at_lab() -> Finding:
    parts = vm_setup.find_parts()
    return lab_finding(vm_setup.lacking(), parts.version if parts else "")


def examine() -> list[Finding]:
    """Every finding, in the order they are printed."""
    copies, bare = look_at_import_paths()  # first, because torch may import copies of its own
    packages = [look_at_package(package) for package in PACKAGES]
    accelerator = look_at_accelerator()
    triton = triton_finding(_version("triton"), declared_triton(), accelerator.state is State.ON)
    return [
        python_finding(sys.version_info[:3], sys.executable),
        copies,
        bare,
        packages[0],
        *([look_at_private_names()] if packages[0].works else []),
        accelerator,
        triton,
        *packages[1:],
        _found("ports", look_at_ports),
        _found("namespaces", look_at_namespaces),
        _found("rdma", look_at_rdma),
        _found("rdma lab", look_at_lab),
    ]


def _found(name: str, look: Callable[[], Finding]) -> Finding:
    """What cannot be examined on this machine is a finding, too."""
    try:
        return look()
    except Exception as failure:
        return Finding(name, State.WARN, f"cannot be examined: {type(failure).__name__}: {failure}".partition("\n")[0])


# ---- printing ----------------------------------------------------------------------------------


def to_text(findings: Sequence[Finding]) -> str:
    """Aligned lines: state, name, detail; a fix is on the next line, under the detail."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state.value:<4}  {finding.name:<{width}}  {finding.detail}")
        if finding.fix:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    lines.append("")
    for what, command in ((Need.JOB, "python -m helixrt.train"), (Need.RAY_JOB, "make train, ray job submit")):
        blocking = [f.name for f in findings if f.needed_for in {Need.JOB, what} and not f.works]
        verdict = f"cannot run: {', '.join(blocking)}" if blocking else "can run"
        title = "main job" if what is Need.JOB else "main job on Ray"
        lines.append(f"{title:<16}({command}): {verdict}")
    return "\n".join(lines)


def to_json(findings: Sequence[Finding]) -> str:
    """One object: `main_job` and `main_job_on_ray` (bool), `findings` (a list of `Finding`)."""
    return json.dumps(
        {
            "main_job": can_run(findings, Need.JOB),
            "main_job_on_ray": can_run(findings, Need.RAY_JOB),
            "findings": [asdict(finding) for finding in findings],
        },
        indent=2,
    )


def main(as_json: bool = False) -> int:
    """Examine, print, and return 0 when the main job can run, else 1."""
    findings = examine()
    print(to_json(findings) if as_json else to_text(findings))
    return 0 if can_run(findings, Need.JOB) else 1


__all__ = ["Finding", "Need", "Package", "State", "examine", "main"]
