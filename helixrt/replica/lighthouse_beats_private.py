"""Heartbeats at torchft's lighthouse from a process without torch: loads torchft's native module alone.

`import torchft` imports torch, which takes seconds and hundreds of megabytes in every monitor process. The native module
`torchft._torchft` needs none of it. It is private to torchft (0.2), so it is used here and nowhere else; `library` is asked of
the process that imported torchft in the ordinary way.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_NAME = "_torchft"  # as the module calls itself


def library() -> str:
    """The file of torchft's native module. Raises ImportError."""
    from torchft import _torchft

    return str(_torchft.__file__)


def beat_of(library: str, lighthouse: str, member: str, timeout_s: float) -> Callable[[], None]:
    """A function that sends one heartbeat of `member`, and connects first if it has to; it blocks at most for about twice
    `timeout_s`, and raises nothing: a lighthouse out of reach shows in the member's next quorum."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, library)
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    client: Any = None
    timeout = timedelta(seconds=timeout_s)

    def beat() -> None:
        nonlocal client
        try:
            client = client or native.LighthouseClient(lighthouse, timeout)
            client.heartbeat(member, timeout)
        except (TimeoutError, RuntimeError, OSError):
            client = None

    return beat
