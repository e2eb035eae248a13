"""Runs the train function of another script; a rank of replica 1 ends by SIGKILL after step 3, and the replica joins again.

`python killed.py STEPS FOLDER SCRIPT [CASE [REPLICAS [DP_SHARD [MEMBERSHIP]]]] [--pp PP] [--cp CP] [--tp TP]
[--device DEVICE] [--dtype DTYPE]`: SCRIPT reads STEPS from its first argument, and CASE if it has any. A replica has
DP_SHARD x TP or PP x CP x TP ranks; the last one ends.
It ends once replica 0 has step 3 as well, which then stands. Replica 0 waits in step 6 until the new incarnation has begun,
and goes on slowly until that takes part again, so that the rejoined replica contributes to many steps on any machine. The ids
that each stream's sampler deals in the first epoch are left in FOLDER/ids.STREAM.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helixrt
from helixrt.replica.run_keys import running_key

FOLDER, SCRIPT = Path(sys.argv[2]), Path(sys.argv[3])
REPLICAS = int(sys.argv[5]) if len(sys.argv) > 5 else 2
DP_SHARD = int(sys.argv[6]) if len(sys.argv) > 6 else 1


def _given(name: str, usual: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else usual


PP, CP, TP = (int(_given(axis, "1")) for axis in ("--pp", "--cp", "--tp"))
THIRD, KILLED, AGAIN = FOLDER / "third", FOLDER / "killed", FOLDER / "again"

spec = importlib.util.spec_from_file_location("script", SCRIPT)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules["script"] = script
spec.loader.exec_module(script)


def train(session: helixrt.Session) -> None:
    log, steps, sampler = session.log, session.steps, session.sampler

    def logged(values: Mapping[str, Any]) -> None:
        log(values)
        assert session.step is not None and session.step.done is not None
        step = session.step.done.step
        last = session.shard == DP_SHARD - 1 and session.settings.tp_rank == TP - 1
        if PP * CP > 1:
            ranks = session._host.connect_stages(session.device).mesh
            last = last and ranks.rank("pp", "cp") == PP * CP - 1
        if session.replica == 0 and step == 3:
            THIRD.touch()
        if session.replica == 1 and last and step == 3 and not KILLED.exists():
            with session.busy("waiting for the other replica", 400.0):
                while not THIRD.exists():
                    time.sleep(0.02)
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if session.replica == 0 and step >= 6:
            with session.busy("waiting for the other replica", 400.0):
                while not AGAIN.exists():
                    time.sleep(0.02)
                if session._host.store.get(running_key(1, 1)) is None:
                    time.sleep(0.5)

    def begun(*args: Any, **options: Any) -> Iterator[helixrt.Step]:
        if session.replica == 1 and KILLED.exists():
            AGAIN.touch()
        return steps(*args, **options)

    def dealt(*args: Any, **options: Any) -> Any:
        ids = sampler(*args, **options)
        (FOLDER / f"ids.{session.stream}.json").write_text(json.dumps(ids.order().tolist()))
        return ids

    session.log, session.steps, session.sampler = logged, begun, dealt  # type: ignore[method-assign]
    script.train(session)


if __name__ == "__main__":
    membership = sys.argv[7] if len(sys.argv) > 7 else "auto"
    options = helixrt.RunOptions(step_timeout_s=240.0, membership=membership)  # a busy machine may take minutes to start ranks
    mesh = helixrt.Mesh(pp=PP, dp_shard=DP_SHARD, cp=CP, tp=TP)
    helixrt.run(
        train,
        replicas=REPLICAS,
        mesh=mesh,
        storage=FOLDER,
        seed=1,
        device=_given("--device", "auto"),
        dtype=_given("--dtype", "float32"),
        options=options,
    )
