"""Whether a folder is the same one on all nodes of the cluster: the run's folder has to be. Versions must be alike, too.

In: a folder on this node, what a rank reserves. Out: ConfigError with the node and the path, or nothing. Each node that could
hold a rank is asked at the start of a run; a rank on a node that comes later looks by itself
(`job.rank_context.check_folder`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError
from helixrt.replica.versions import check_versions, versions

ANSWER_S = 60.0  # a node may have to start a process first


def check_shared(folder: Path, rank: Mapping[str, float]) -> None:
    """Raises ConfigError (storage) unless every node on which a rank that reserves `rank` fits reads here, and writes there,
    what this process does; ConfigError for a node with other versions (helixrt, torch). Needs a connected process."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    sign, word = folder / f".shared.{secrets.token_hex(4)}", secrets.token_hex(8)
    sign.write_text(word, encoding="utf-8")
    ask: Any = ray.remote(num_cpus=0, max_retries=0)(_look)
    asked = {}
    for node in ray.nodes():
        if node["Alive"] and all(node["Resources"].get(name, 0.0) >= amount for name, amount in rank.items()):
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[node["NodeManagerAddress"], node["NodeID"]] = ask.options(scheduling_strategy=place).remote(str(sign), word)
    deadline = time.monotonic() + ANSWER_S
    try:
        for (address, node_id), answer in asked.items():
            try:
                told = ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
            except ray.exceptions.RayError as error:
                if not _alive(ray, node_id):
                    continue  # it left meanwhile
                told = f"the node does not answer: {str(error).strip().splitlines()[0]}", versions()
            wrong, there = told if isinstance(told, tuple) else ("", {})  # an earlier helixrt
            check_versions(there, f"node {address}")
            if not wrong and not Path(f"{sign}.{node_id}").is_file():
                wrong = "what the node writes there is not seen here"
            if wrong:
                rule = f"must be a folder that all nodes of the cluster share; on node {address}: {wrong}"
                raise ConfigError("storage", folder, rule)
    finally:
        for file in (sign, *folder.glob(f"{sign.name}.*")):
            file.unlink(missing_ok=True)


def _alive(ray: Any, node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def _look(sign: str, word: str) -> tuple[str, dict[str, str]]:
    """On a node: what is wrong there, and its versions; leaves a file beside the sign, named by the node."""
    import ray

    try:
        if Path(sign).read_text(encoding="utf-8") != word:
            return "there is another folder at this path", versions()
        Path(f"{sign}.{ray.get_runtime_context().get_node_id()}").write_text(word, encoding="utf-8")
    except OSError as error:
        return f"{error.strerror or error}", versions()
    return "", versions()
