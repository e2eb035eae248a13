"""Torchft's lighthouse, and heartbeats at it, in a process without torch: loads torchft's native module alone.

`import torchft` imports torch, which takes seconds and hundreds of megabytes in every monitor process, and seconds that a run
would stand still while its lighthouse is started again. The native module `torchft._torchft` needs none of it. It is private to
torchft (0.2), so it is used here and nowhere else; `library` is asked of the process that imported torchft in the ordinary way.
Where it cannot be loaded alone, the processes import torchft, and one line in the log says what that costs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from helixrt.private_api import TORCHFT_NATIVE, tell_once

_NAME = "_torchft"  # as the module calls itself


def library() -> str:
    """The file of torchft's native module; empty where torchft has none. Raises ImportError without torchft."""
    import torchft

    return str(getattr(getattr(torchft, _NAME, None), "__file__", None) or "")


def server_class() -> Callable[..., Any]:
    """`torchft.coordination.LighthouseServer`, without torchft's package. Raises ImportError."""
    server: Callable[..., Any] = _class(native_module(), "LighthouseServer")
    return server


def native_module() -> str:
    """The same file as `library`, without importing torchft. Raises ImportError without torchft."""
    package = importlib.util.find_spec("torchft")
    if package is None or package.submodule_search_locations is None:
        raise ImportError("torchft is not installed")
    found = importlib.machinery.PathFinder.find_spec(_NAME, package.submodule_search_locations)
    return found.origin or "" if found is not None else ""


def _class(library: str, name: str) -> Any:
    """`name` of the native module alone, or else of torchft."""
    try:
        return getattr(_native(library), name)
    except (ImportError, AttributeError) as error:
        tell_once(TORCHFT_NATIVE, f"has no native module with {name} ({type(error).__name__})")
    from torchft import coordination

    return getattr(coordination, name)


def _native(library: str) -> Any:
    if not library:
        raise ImportError("torchft has no native module")
    loader = importlib.machinery.ExtensionFileLoader(_NAME, library)
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    return native


def beat_of(library: str, lighthouse: str, member: str, timeout_s: float) -> Callable[[], None]:
    """A function that sends one heartbeat of `member`, and connects first if it has to; it blocks at most for about twice
    `timeout_s`, and raises nothing: a lighthouse out of reach shows in the member's next quorum."""
    make_client = _class(library, "LighthouseClient")
    client: Any = None
    timeout = timedelta(seconds=timeout_s)

    def beat() -> None:
        nonlocal client
        try:
            client = client or make_client(lighthouse, timeout)
            client.heartbeat(member, timeout)
        except (TimeoutError, RuntimeError, OSError):
            client = None

    return beat
