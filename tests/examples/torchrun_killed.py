"""Runs examples/existing_loop.py under torchrun; replica 1 ends by SIGKILL after step 3, and is started again by torchrun.

`torchrun ... torchrun_killed.py STEPS FOLDER`. Replica 1 ends once replica 0 has step 3 as well, which then stands. Replica 0
waits in step 6 until the new incarnation has begun, and goes on slowly until that takes part again, so that the rejoined
replica contributes to many steps on any machine.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helixrt

FOLDER = Path(sys.argv[2])
THIRD, KILLED, AGAIN = FOLDER / "third", FOLDER / "killed", FOLDER / "again"
init = helixrt.init


def disturbed(**settings: Any) -> helixrt.Session:
    if KILLED.exists() and os.environ["HELIXRT_REPLICA"] == "1":
        AGAIN.touch()
    session = init(**settings)
    log = session.log

    def logged(values: Mapping[str, Any]) -> None:
        log(values)
        assert session.step is not None and session.step.done is not None
        done, step = session.step.done, session.step.done.step
        if session.replica == 0 and step == 3:
            THIRD.touch()
        if session.replica == 1 and step == 3 and not KILLED.exists():
            with session.busy("waiting for the other replica", 200.0):
                while not THIRD.exists():
                    time.sleep(0.02)
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if session.replica == 0 and step >= 6:
            with session.busy("waiting for the other replica", 200.0):
                while not AGAIN.exists():
                    time.sleep(0.02)
                if 1 not in done.contributors:
                    time.sleep(min(5.0, 0.2 * step))

    session.log = logged  # type: ignore[method-assign]
    return session


helixrt.init = disturbed
path = Path(__file__).parents[2] / "examples" / "existing_loop.py"
spec = importlib.util.spec_from_file_location("existing_loop", path)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.main()
