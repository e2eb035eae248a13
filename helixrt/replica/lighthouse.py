"""The settings of torchft's lighthouse, by whichever module its server comes. Imports neither torch nor torchft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helixrt.timeouts import Timeouts

_TICK_MS = 10


def begin_lighthouse(server: Callable[..., Any], timeouts: Timeouts, host: str, port: int = 0) -> tuple[Any, str]:
    """Start a lighthouse on `host`; port 0 takes any free one. `server`: torchft's `LighthouseServer`. Returns it (it has
    `shutdown()`) and its address. Raises what torchft raises if it cannot listen there.

    A quorum may be a single replica, so that the last survivor goes on; at the start of a run all that have announced
    themselves are waited for (`membership`).
    """
    named = f"[{host}]" if ":" in host else host  # an address of IPv6
    serving = server(
        bind=f"{named}:{port}",
        min_replicas=1,
        join_timeout_ms=round(timeouts.join_s * 1000),
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=round(timeouts.heartbeat_limit_s * 1000),
    )
    # It names itself by the machine's name, which need not lead to the interface it is bound to.
    return serving, f"http://{named}:{serving.address().rsplit(':', 1)[1]}"
