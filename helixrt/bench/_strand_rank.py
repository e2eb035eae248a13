"""One rank of `helixrt bench strands`: a program that carries out the benchmark's requests, line by line.

In: a `Shape` as JSON in the first argument; then lines of JSON on standard input, the same on every rank, which name a
method of `Rank` and its arguments. Out: for each a line of JSON on standard output. Where and who it is it knows from
the environment that `lab.net.Network` gives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from helixrt.bench._live_storage import LiveStorage
from helixrt.bench._strand_variants import ABLATION, PAIRED, TARGET, TOKENS, Shape, Stage, Way, token_loss
from helixrt.collectives.gloo_groups_private import one_gloo_worker
from helixrt.errors import Fatal
from helixrt.job.heap import keep_freed_memory
from helixrt.parallel.group import Group
from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.classify import sent_bytes
from helixrt.passes.measure import low_quantile
from helixrt.passes.pair import Rules
from helixrt.passes.profile import Mode, profile

TIMEOUT_S = 120
TOLERANCE = 1e-4  # of eager and graphs, of the largest element: float32 sums in another order


class Rank:
    """This rank's stage; each public method answers one request."""

    def __init__(self, shape: Shape) -> None:
        group = Group.of(dist.group.WORLD)
        assert group is not None, "a shared model needs two ranks"
        self.shape, self.group = shape, group
        self.on_gpu = shape.device == "cuda"
        self.ways: dict[str, Way] = {}
        self.results: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        self.build(shape)

    def build(self, shape: Shape) -> None:
        self.module = shape.module(self.group)
        inputs = shape.inputs(self.group)
        joint = capture(self.module, (inputs[0][TOKENS],), loss=token_loss, target=inputs[0][TARGET])
        self.stage = Stage(joint, self.module, inputs)
        self.communication = self.stage.communication()

    def alone(self, times: int) -> dict[str, float]:
        """Seconds of a step's compute (processor time; of a GPU by the clock), bytes put into its collectives, and
        `alone_communication`."""
        compute = self.stage.compute()
        self.step(compute)
        computed = []
        for _ in range(times):
            worked = time.process_time()
            wall = self.step(compute)
            computed.append(wall if self.on_gpu else time.process_time() - worked)
        parts = self.stage.forward, self.stage.backward
        sent = sum(sent_bytes(node) for part in parts for node in part.graph.nodes if nodes.is_collective(node))
        alone = {"compute_s": low_quantile(computed), "sent_bytes": float(sent * self.shape.microbatches)}
        return alone | self.alone_communication(times)

    def alone_communication(self, times: int) -> dict[str, float]:
        """Seconds of a step's communication as the link now is: wall, and this process's processor time (a GPU has none)."""
        self.communicate()
        wall, work = zip(*(self.communicate() for _ in range(times)), strict=True)
        return {"communication_s": median(wall), "work_s": 0.0 if self.on_gpu else low_quantile(work)}

    def plan(self, cache: str) -> dict[str, Any]:
        """Profile at the link's rate and make all ways; every one runs once and must give what the others give."""
        parts = self.stage.forward, self.stage.backward
        measured = profile(parts, mode=Mode.AUTO, cache=Path(cache))
        self.ways = {"eager": self.stage.eager(), "single": self.stage.single()}
        self.ways |= self.stage.paired(measured, {**PAIRED, **ABLATION})
        self.results.clear()
        for name, way in self.ways.items():
            if way.same_as is None:
                self.check(name, way)
        self.ways["compute"] = self.stage.compute()
        self.step(self.ways["compute"])
        answer: dict[str, Any] = {"profile_s": measured.seconds, "operators": len(measured.times)}
        pairings = {name: way.pairing for name, way in self.ways.items() if way.pairing is not None}
        answer["ways"] = {
            name: {
                "policy": pairing.policy,
                "same_as": self.ways[name].same_as,
                "predicted_us": pairing.predicted_us,
                "sequential_us": pairing.sequential_us,
                "bound_us": pairing.bound_us,
                "compute_us": pairing.compute_us,
                "communication_us": pairing.communication_us,
            }
            for name, pairing in pairings.items()
        }
        answer["times"] = {name: [t.time_us, t.host_us] for name, t in measured.times.items() if " over " in name}
        return answer

    def check(self, name: str, way: Way) -> None:
        """Raise Fatal unless this way's losses and gradients are those of the others: bit by bit among graphs."""
        self.module.zero_grad()
        losses = way.run()
        mine = losses, {key: p.grad for key, p in self.module.named_parameters() if p.grad is not None}
        self.module.zero_grad()
        for other, (theirs, gradients) in self.results.items():
            exact = "eager" not in (name, other)
            if not alike(losses, theirs, exact) or mine[1].keys() != gradients.keys():
                raise Fatal(f"{name} and {other} must train the same, but their losses are {losses} and {theirs}")
            for key, gradient in gradients.items():
                if not alike(mine[1][key], gradient, exact):
                    raise Fatal(f"{name} and {other} must train the same, but their gradients of {key} differ")
        if name in ("eager", "single"):
            self.results[name] = mine

    def round(self, names: list[str]) -> dict[str, list[float]]:
        """Run each way once, in this order: seconds, and this process's processor time (with a GPU: seconds)."""
        taken = {}
        for name in names:
            worked = time.process_time()
            wall = self.communicate()[0] if name == "communication" else self.step(self.ways[name])
            taken[name] = [wall, wall if self.on_gpu else time.process_time() - worked]
        return taken

    def trace(self, way: str, path: str) -> dict[str, int]:
        """A step of one way as a Chrome trace; the first rank writes it."""
        activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if self.on_gpu else [])]
        with torch.profiler.profile(activities=activities) as profiler:
            self.step(self.ways[way])
        if self.group.rank == 0:
            profiler.export_chrome_trace(path)
        return {"events": len(profiler.events())}

    def memory(self, layers: int) -> dict[str, int]:
        """Peak bytes of live tensors in a step besides parameters, of one strand and two."""
        shape = Shape(**{**vars(self.shape), "layers": layers})
        self.build(shape)
        measured = profile([self.stage.forward, self.stage.backward], mode=Mode.ESTIMATE)
        ways = {"single": self.stage.single(), **self.stage.paired(measured, {"helix": ("helix", Rules())})}
        peaks = {}
        for name, way in ways.items():
            self.module.zero_grad()
            with LiveStorage([*self.module.parameters(), *self.module.buffers()]) as live:
                way.run()
            peaks[name] = live.peak_bytes
        self.module.zero_grad()
        return peaks

    def step(self, way: Way) -> float:
        self.module.zero_grad(set_to_none=False)  # gradients stay where they are, as in a trainer's buckets
        dist.barrier()
        self.synchronize()
        begin = time.perf_counter()
        way.run()
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def communicate(self) -> tuple[float, float]:
        dist.barrier()
        worked, begin = time.process_time(), time.perf_counter()
        self.communication()
        self.synchronize()
        return time.perf_counter() - begin, time.process_time() - worked


def alike(one: torch.Tensor, other: torch.Tensor, exact: bool) -> bool:
    if exact:
        return torch.equal(one, other)
    return bool((one - other).abs().max() <= TOLERANCE * max(float(other.abs().max()), 1e-6))


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not get between the answers
    here, hosts = int(os.environ["HELIXRT_HOST"]), int(os.environ["HELIXRT_HOSTS"])
    one_gloo_worker()  # of both sides: the collectives of either complete at once
    dist.init_process_group("gloo", rank=here, world_size=hosts, timeout=timedelta(seconds=TIMEOUT_S))
    rank = Rank(Shape(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(rank, request["do"])(**request["with"])
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
