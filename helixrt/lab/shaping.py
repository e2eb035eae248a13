"""How fast a device may send, as the kernel's token bucket (tbf), and how long packets travel (netem), where it exists.

Pure: rates and shapes in, arguments of `tc` out. A bucket holds `burst_bytes`: what a device that was idle may send at
once. 4 ms at the rate keeps a flow at its rate on a busy machine, whose timers are late, and lets one TCP segmentation
offload (64 KB) through whole from 130 Mbit/s on; below, the kernel splits it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from helixrt.errors import ConfigError

BURST_MS, LEAST_BURST_BYTES = 4.0, 16 * 1024
MOST_QUEUE_BYTES = 2**31 - 1  # the kernel counts a queue in 32 bits
DELAYED_PACKETS = 100_000  # packets netem holds at once: more than a queue of any rate and delay used here
UNITS_MBIT = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


@dataclass(frozen=True)
class Shape:
    """One direction of a rail: `rate_mbit` (None: unlimited), one-way `delay_ms`, burst and queue of the bucket.

    Packets that would wait longer than `queue_ms` for the rate are dropped, as a switch does.
    """

    rate_mbit: float | None = None
    delay_ms: float = 0.0
    burst_bytes: int | None = None  # None: BURST_MS at the rate
    queue_ms: float = 200.0

    def __post_init__(self) -> None:
        if self.rate_mbit is not None and not (math.isfinite(self.rate_mbit) and self.rate_mbit >= 0.008):
            raise ConfigError("rate_mbit", self.rate_mbit, "is at least 0.008 (a kilobyte per second), or None for no limit")
        if not 0 <= self.delay_ms <= 10_000:
            raise ConfigError("delay_ms", self.delay_ms, "is between 0 and 10000")
        if not 0 < self.queue_ms <= 60_000:
            raise ConfigError("queue_ms", self.queue_ms, "is above 0 and at most 60000")
        if self.burst_bytes is not None and not 2_000 <= self.burst_bytes <= MOST_QUEUE_BYTES:
            raise ConfigError("burst_bytes", self.burst_bytes, "is at least 2000 (one packet), or None for 4 ms at the rate")

    def at(self, rate_mbit: float | None) -> Shape:
        """The same with another rate."""
        return replace(self, rate_mbit=rate_mbit)


def parse_rate(text: str) -> float | None:
    """Mbit/s of "500mbit", "1.5gbit" or "64kbit"; None for "none". ConfigError for anything else."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if found is None:
        raise ConfigError("rate", text, "is a number with kbit, mbit or gbit, as in 500mbit; or none")
    return Shape(float(found[1]) * UNITS_MBIT[found[2]]).rate_mbit


def bucket(shape: Shape) -> list[str]:
    """The token bucket of a rated shape, in words of `tc`."""
    assert shape.rate_mbit is not None
    bytes_per_ms = shape.rate_mbit * 125
    burst = shape.burst_bytes or max(LEAST_BURST_BYTES, round(BURST_MS * bytes_per_ms))
    limit = min(MOST_QUEUE_BYTES, burst + round(shape.queue_ms * bytes_per_ms))
    return ["tbf", "rate", f"{round(shape.rate_mbit * 1e6)}bit", "burst", str(burst), "limit", str(limit)]


def changes(device: str, old: Shape, new: Shape) -> list[list[str]]:
    """Arguments of `tc`, one list per call, that take `device` from one shape to another of the same delay.

    A rate that changes keeps what is queued; a rate that goes (None) drops it.
    """
    place, steps = ["root"], []
    if new.delay_ms:
        place = ["parent", "1:1", "handle", "10:"]
        if not old.delay_ms:
            delay = ["delay", f"{new.delay_ms}ms", "limit", str(DELAYED_PACKETS)]
            steps.append(["qdisc", "replace", "dev", device, "root", "handle", "1:", "netem", *delay])
    if new.rate_mbit is not None:
        steps.append(["qdisc", "replace", "dev", device, *place, *bucket(new)])
    elif old.rate_mbit is not None:
        steps.append(["qdisc", "del", "dev", device, *place])
    return steps
