"""The reduce-copy and copy kernels: GB/s by the number of thread blocks, compared with torch and the GPU's copy bandwidth.

Needs a CUDA GPU. Every turn runs each variant once, in a random order, so that all run at the same clock rate; a variant's time
is that of several launches between two events of one stream, over buffers that do not fit into the GPU's cache. `payload`
counts the bytes of one result, which is what a network card would carry (FT-HSDP section 4.2 asks that two thread blocks
keep up with it); `traffic` counts all bytes read and written, for comparison with the card's copy bandwidth.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import Spread, write
from helixrt.errors import ConfigError
from helixrt.triton_kernels.reduction import PROGRAMS, copy, reduce_copy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NIC_GB_PER_S = 50.0  # the payload of a 400 Gbit/s network card
CACHES = 4  # how many times the card's cache each buffer must be


@dataclass(frozen=True)
class Settings:
    megabytes: int
    dtype: str
    programs: tuple[int, ...]
    rounds: int
    launches: int
    seed: int


@dataclass(frozen=True)
class Variant:
    """What is run, and how many tensors' worth of bytes it reads and writes per result."""

    what: str  # "reduce_copy", "reduce_copy_two", "mean_two", "copy", or the alternative in torch: "torch_…"
    programs: int | None  # None: as torch pleases
    moved: int

    @property
    def name(self) -> str:
        return self.what if self.programs is None else f"{self.what}_{self.programs}"


KERNELS = {"copy": 2, "reduce_copy": 3, "reduce_copy_two": 4, "mean_two": 4}  # -> tensors moved
# Two calls read the result again for the second destination; the mean's division is a call of its own, in place.
TORCH = {"copy": 2, "reduce_copy": 3, "reduce_copy_two": 5, "mean_two": 7}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=256, help="size of one tensor")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type of the elements")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of thread blocks")
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each variant")
    parser.add_argument("--launches", type=int, default=3, help="launches per measurement")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of variants")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError where there is no card, and for settings that cannot work."""
    settings = _settings(args)
    milliseconds = measure(settings)
    payload, traffic = rates(settings, milliseconds)
    print(f"kernels: {settings.megabytes} MiB of {settings.dtype} on {torch.cuda.get_device_name()}; payload in GB/s")
    for what in KERNELS:
        beside = payload[f"torch_{what}"]
        print(f"  {what:16} torch        {beside}")
        for programs in settings.programs:
            ours = payload[f"{what}_{programs}"]
            print(f"  {'':16} {programs:3} programs {ours}   {ours.p50 / beside.p50:.2f} of torch")
    print(f"  copy bandwidth of the card (read and written): {traffic['torch_copy']}")
    if PROGRAMS in settings.programs:
        least = min(payload[f"{what}_{PROGRAMS}"].p50 for what in KERNELS)
        print(f"  the slowest of {PROGRAMS} programs gives {least / NIC_GB_PER_S:.2f} of a 400 Gbit/s network card's payload")
    spreads = {
        **{f"ms_{name}": Spread.of(values) for name, values in milliseconds.items()},
        **{f"payload_gb_per_s_{name}": spread for name, spread in payload.items()},
        **{f"traffic_gb_per_s_{name}": spread for name, spread in traffic.items()},
    }
    write(args.json, "kernels", asdict(settings), spreads, versions={"triton": _triton_version(), "cuda": torch.version.cuda})
    return 0


def variants(programs: tuple[int, ...]) -> list[Variant]:
    ours = [Variant(what, number, moved) for what, moved in KERNELS.items() for number in programs]
    return ours + [Variant(f"torch_{what}", None, moved) for what, moved in TORCH.items()]


def rates(settings: Settings, milliseconds: Mapping[str, list[float]]) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """GB/s (10**9 bytes) of payload and of traffic, by variant, from milliseconds per launch."""
    gigabytes = settings.megabytes * 2**20 / 1e9
    payload, traffic = {}, {}
    for variant in variants(settings.programs):
        per_s = [1000 * gigabytes / ms for ms in milliseconds[variant.name]]
        payload[variant.name] = Spread.of(per_s)
        traffic[variant.name] = Spread.of([variant.moved * rate for rate in per_s])
    return payload, traffic


def measure(settings: Settings) -> dict[str, list[float]]:
    """Name of a variant -> milliseconds per launch, one figure a round."""
    dtype = DTYPES[settings.dtype]
    length = settings.megabytes * 2**20 // dtype.itemsize
    left, right = (torch.randn(length, device="cuda").to(dtype) for _ in range(2))
    out, also = torch.empty_like(left), torch.empty_like(left)
    every = variants(settings.programs)
    calls = {variant.name: _call(variant, left, right, out, also) for variant in every}
    for call in calls.values():  # compiles, and warms up
        call()
    rng = random.Random(settings.seed)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(settings.rounds):
        for name in rng.sample(list(calls), len(calls)):
            begin.record()
            for _ in range(settings.launches):
                calls[name]()
            end.record()
            end.synchronize()
            taken[name].append(begin.elapsed_time(end) / settings.launches)
    return taken


def _call(
    variant: Variant, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, also: torch.Tensor
) -> Callable[[], object]:
    if variant.programs is not None:
        programs = variant.programs
        return {
            "copy": lambda: copy(left, out, programs=programs),
            "reduce_copy": lambda: reduce_copy(left, right, out, programs=programs),
            "reduce_copy_two": lambda: reduce_copy(left, right, out, also, programs=programs),
            "mean_two": lambda: reduce_copy(left, right, out, also, divisor=3, programs=programs),
        }[variant.what]
    return {
        "torch_copy": lambda: out.copy_(left),
        "torch_reduce_copy": lambda: torch.add(left, right, out=out),
        "torch_reduce_copy_two": lambda: also.copy_(torch.add(left, right, out=out)),
        "torch_mean_two": lambda: also.copy_(torch.add(left, right, out=out).div_(3)),
    }[variant.what]


def _settings(args: argparse.Namespace) -> Settings:
    settings = Settings(args.megabytes, args.dtype, tuple(sorted(set(args.programs))), args.rounds, args.launches, args.seed)
    check_least(settings, megabytes=1, programs=1, rounds=2, launches=1)
    if not torch.cuda.is_available():
        raise ConfigError("bench", "kernels", "needs a CUDA card, and PyTorch sees none here")
    cache = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0)
    if settings.megabytes * 2**20 < CACHES * cache:
        least = -(-CACHES * cache // 2**20)
        raise ConfigError(
            "--megabytes", settings.megabytes, f"must be at least {least}: this card's cache would hold the tensors"
        )
    return settings


def _triton_version() -> str:
    from importlib.metadata import version

    return version("triton")
