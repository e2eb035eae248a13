"""What names the machine that a process runs on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def boot_identity() -> str:
    """Of the running kernel: equal for processes that read the same clock. "" where a machine does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
