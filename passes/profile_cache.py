"""What is known of operators from earlier runs, on disk.

In and out: `Known`: times, measured pairs and rates by signatures. One JSON file for each `Setting` (device, versions,
threads, link), in `$HELIXRT_CACHE`, else below `$XDG_CACHE_HOME` or `~/.cache`. A file that cannot be read counts as
empty; one that cannot be written is a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from helixrt.passes.classify import Time
from helixrt.passes.estimate import Rates, Wire
from helixrt.passes.measure import Together

FORMAT = 4  # of the files, and of signatures
MOST = 50_000  # operators of a file


@dataclass(frozen=True)
class Setting:
    """What all times of a file have in common. `link` is what the user calls the wires, if they differ otherwise.

    `precision` is how exact matrix products are to be and whether operators are deterministic, `libraries` are the versions
    of those that torch calls.
    """

    device: str
    torch_version: str
    threads: int
    cores: int
    ranks: int
    link: str = ""
    precision: str = ""
    libraries: str = ""

    @staticmethod
    def here(device: torch.device, ranks: int, link: str = "") -> Setting:
        """This process's."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        return Setting(name, torch.__version__, threads, cores, ranks, link, precision(), libraries(device))

    def file(self, folder: Path) -> Path:
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        readable = re.sub(r"\W+", "-", self.device).strip("-").lower()[:40]
        return folder / f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class Known:
    """Times and pairs by signatures; in pairs the second is the collective launched first."""

    times: Mapping[str, Time] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str], Together] = field(default_factory=dict)
    rates: Rates | None = None

    def joined(self, later: Known) -> Known:
        """Both; where both know something, what `later` does."""
        rates = later.rates or self.rates
        if rates is not None and self.rates is not None:
            both = (self.rates, rates)
            flops, wires = ({k: v for r in both for k, v in getattr(r, name).items()} for name in ("flops", "wires"))
            rates = replace(rates, flops=flops, wires=wires)
        return Known({**self.times, **later.times}, {**self.pairs, **later.pairs}, rates)

    def without(self, group: str) -> Known:
        """All but the communication of one group, by its description."""
        ending = f" over {group}"
        times = {name: time for name, time in self.times.items() if not name.endswith(ending)}
        pairs = {names: pair for names, pair in self.pairs.items() if not any(n.endswith(ending) for n in names)}
        rates = self.rates
        if rates is not None:
            rates = replace(rates, wires={name: wire for name, wire in rates.wires.items() if name != group})
        return Known(times, pairs, rates)

    def only(self, names: Collection[str]) -> Known:
        """Of operators of these names."""
        times = {name: time for name, time in self.times.items() if name in names}
        pairs = {pair: together for pair, together in self.pairs.items() if all(name in names for name in pair)}
        return Known(times, pairs, self.rates)

    def newest(self, count: int) -> Known:
        """Of the operators that were measured last, at most so many."""
        return self if len(self.times) <= count else self.only(frozenset(list(self.times)[-count:]))

    def kept(self) -> Known:
        """What is worth keeping: without what was measured on a machine that was too busy to tell."""
        times = {name: time for name, time in self.times.items() if time.measured and time.steady}
        pairs = {names: pair for names, pair in self.pairs.items() if pair.steady}
        return Known(times, pairs, self.rates if self.rates is not None and self.rates.steady else None)

    def to_json(self) -> dict[str, Any]:
        return {
            "times": {name: asdict(time) for name, time in self.times.items()},
            "pairs": [{"first": a, "second": b, **asdict(pair)} for (a, b), pair in self.pairs.items()],
            "rates": asdict(self.rates) if self.rates is not None else None,
        }

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Known:
        """Raises KeyError, TypeError or AttributeError for what `to_json` does not give."""
        pairs = {}
        for entry in found["pairs"]:
            numbers = {key: value for key, value in entry.items() if key not in ("first", "second")}
            pairs[entry["first"], entry["second"]] = Together(**numbers)
        rates = found["rates"]
        if rates is not None:
            wires = {name: Wire(**wire) for name, wire in rates["wires"].items()}
            rates = Rates(**{**rates, "wires": wires})
        return Known({name: Time(**time) for name, time in found["times"].items()}, pairs, rates)


def precision() -> str:
    """The process's settings that decide which kernels matrix products, convolutions and attention take."""
    cuda = torch.backends.cuda
    said = {
        "matmul": _precision_of(cuda.matmul, "fp32_precision") or torch.get_float32_matmul_precision(),
        "cpu matmul": _precision_of(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision"),
        "conv": _precision_of(getattr(torch.backends.cudnn, "conv", None), "fp32_precision"),
        "cpu conv": _precision_of(getattr(torch.backends.mkldnn, "conv", None), "fp32_precision"),
        "half sums": (cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction),
        "half accumulation": getattr(cuda.matmul, "allow_fp16_accumulation", None),
        "blas": str(cuda.preferred_blas_library()),
        "attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
        ),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "denormals": torch.tensor(1e-40).add(0.0).item() == 0.0,
    }  # fmt: skip
    return json.dumps(said)


def _precision_of(settings: object, name: str) -> str:
    return str(getattr(settings, name, ""))


def libraries(device: torch.device) -> str:
    """Versions of what torch calls: how it was built, and on a GPU the toolkit, the driver's and the collectives'."""
    built = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:10]
    said = [f"build {built}", torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        said += [f"cuda {torch.version.cuda}", f"cudnn {torch.backends.cudnn.version()}", f"nccl {nccl}"]
    with suppress(PackageNotFoundError):
        said.append(f"triton {version('triton')}")
    return ", ".join(said)


def default_folder() -> Path:
    """Where profiles are kept unless said otherwise."""
    if said := os.environ.get("HELIXRT_CACHE"):
        return Path(said) / "profiles"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "helixrt" / "profiles"


def load(setting: Setting, folder: Path) -> Known:
    """The content of the setting's file; nothing if there is none that can be read."""
    try:
        return Known.from_json(json.loads(setting.file(folder).read_text(encoding="utf-8"))["known"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Known()


def save(setting: Setting, folder: Path, known: Known) -> None:
    """Add what is steady to the setting's file; other processes see the old file or the new one, never half of one."""
    path = setting.file(folder)
    before, now = load(setting, folder), known.kept()
    others = Known({name: time for name, time in before.times.items() if name not in now.times}, before.pairs, before.rates)
    everything = {"setting": asdict(setting), "known": others.joined(now).newest(MOST).to_json()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".part", delete=False) as file:
            json.dump(everything, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"the profile is not kept for the next run: {path}: {error.strerror}", stacklevel=2)


def processor() -> str:
    """What this machine calls its processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else os.uname().machine
