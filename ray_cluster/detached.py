"""A function in a process of the cluster that stays when the job which started it ends: a detached Ray actor.

In: the function as `module:function`, its argument as plain data. Out: the process runs on this node, with the job's code,
until the function has returned.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helixrt.ray_cluster.actors import send_output_to
from helixrt.replica.variables import adopt

STARTED_S = 120.0


class DetachedProcess:
    """Made into an actor by `start_detached`. `log` gets the process's output; `environment` is set before anything is
    imported."""

    def __init__(self, log: str, environment: Mapping[str, str]) -> None:
        adopt(environment)
        send_output_to(Path(log))

    def begin(self, entry: str, argument: dict[str, Any]) -> None:
        """Begin to run the function, in a thread of its own; the process ends with it."""
        threading.Thread(target=_run, args=(entry, argument), name="helixrt-detached").start()


def is_connected() -> bool:
    """Whether this process is connected to a cluster."""
    import ray

    return bool(ray.is_initialized())


def start_detached(name: str, entry: str, argument: dict[str, Any], log: Path, environment: Mapping[str, str]) -> None:
    """Start it on this node. Needs a connected process. Raises what Ray raises if the actor does not start."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {
        "name": name,
        "namespace": "helixrt",  # Ray requires a named namespace for actors that outlive a job
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": here,
    }
    actor: Any = ray.remote(DetachedProcess).options(**options).remote(str(log), dict(environment))
    ray.get(actor.begin.remote(entry, argument), timeout=STARTED_S)


def _run(entry: str, argument: dict[str, Any]) -> None:
    code = 0
    try:
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(argument)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
