"""The figures of a benchmark: percentiles, the machine that they belong to, one JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The 20th, 50th and 80th percentile of a sample."""

    p20: float
    p50: float
    p80: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Raises statistics.StatisticsError for fewer than two values."""
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        return Spread(fifths[0], statistics.median(values), fifths[3])

    def __str__(self) -> str:
        return f"p20 {self.p20:.4g}  p50 {self.p50:.4g}  p80 {self.p80:.4g}"


def machine() -> dict[str, Any]:
    """Device and versions that figures belong to."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


def print_spreads(spreads: Mapping[str, Spread]) -> None:
    for name, spread in spreads.items():
        print(f"  {name:30} {spread}")


def write(path: Path | None, name: str, settings: dict[str, Any], spreads: Mapping[str, Spread], **more: Any) -> None:
    """Write a benchmark's figures to `path` as JSON, and print where they are; with None nothing is done."""
    if path is None:
        return
    figures = {key: asdict(spread) for key, spread in spreads.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    everything = {"benchmark": name, "machine": machine(), "settings": settings, "figures": figures, **more}
    path.write_text(json.dumps(everything, indent=2) + "\n")
    print(f"  written to {path}")
