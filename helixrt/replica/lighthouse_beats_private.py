"""Torchft's lighthouse, and heartbeats at it, in a process without torch: loads torchft's native module alone.

`import torchft` imports torch, which takes seconds and hundreds of megabytes in every monitor process, and seconds that a run
would stand still while its lighthouse is started again. The native module `torchft._torchft` needs none of it. It is private to
torchft (0.2), so it is used here and nowhere else; `library` is asked of the process that imported torchft in the ordinary way.
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


def server_class() -> Callable[..., Any]:
    """`torchft.coordination.LighthouseServer`, without torchft's package. Raises ImportError."""
    server: Callable[..., Any] = _native(native_module()).LighthouseServer
    return server


def native_module() -> str:
    """The same file as `library`, without importing torchft. Raises ImportError."""
    package = importlib.util.find_spec("torchft")
    places = package.submodule_search_locations if package is not None else None
    found = importlib.machinery.PathFinder.find_spec(_NAME, places) if places else None
    if found is None or found.origin is None:
        raise ImportError("torchft has no native module")
    return found.origin


def _native(library: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, library)
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    return native


def beat_of(library: str, lighthouse: str, member: str, timeout_s: float) -> Callable[[], None]:
    """A function that sends one heartbeat of `member`, and connects first if it has to; it blocks at most for about twice
    `timeout_s`, and raises nothing: a lighthouse out of reach shows in the member's next quorum."""
    native = _native(library)
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
