"""torchft's own train loop with helixrt's process group and with torchft's Gloo group: one replica group is killed.

    python examples/torchft_ddp.py [STEPS] [FOLDER]

Two replica groups of one process each train a small model by torchft's `Manager`, `DistributedDataParallel` and `Optimizer`.
Group 1 is killed after a third of the steps and started again. The last lines report the longest step of group 0 after that,
which is its stall, and the median step. Most of the stall is until torchft's lighthouse leaves the lost group out.
"""

import multiprocessing
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from helixrt.collectives import ProcessGroupHelix

KINDS = ("helix", "gloo")


def train(kind: str, group: int, steps: int, lighthouse: str, folder: Path, together: object = None) -> None:
    """torchft's loop. Each committed step is a line of a file: its number and the time."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optim": optim.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupHelix(timeout=timedelta(seconds=30)) if kind == "helix" else ProcessGroupGloo(timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"group{group}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=30),
    )
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(data, replica_rank=group, num_replica_groups=2, group_rank=0, num_replicas=1)
    loader = StatefulDataLoader(data, batch_size=8, sampler=sampler)
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, optim)
    if together is not None:
        together.wait(120)  # else the first group may be through before the second one has started
    with open(folder / f"{kind}-group{group}.txt", "a", buffering=1) as lines:
        while manager.current_step() < steps:
            for batch, target in loader:
                before = manager.current_step()
                optimizer.zero_grad()  # torchft: begins the quorum
                nn.functional.mse_loss(wrapped(batch), target).backward()
                optimizer.step()
                if manager.current_step() > before:
                    lines.write(f"{manager.current_step()} {time.monotonic()} {manager.num_participants()}\n")
                if manager.current_step() >= steps:
                    break
                time.sleep(0.02)  # as if the step took this long to compute
    manager.shutdown(wait=False)


def committed(file: Path) -> list[tuple[int, float, int]]:
    """Step, time and participants of each committed step of a group."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(step), float(at), int(participants)) for step, at, participants in (line.split() for line in lines)]


def stall(kind: str, steps: int, folder: Path) -> str:
    """Run both groups, kill one; what group 0 waited."""
    context = multiprocessing.get_context("forkserver")  # processes start from one that has imported everything
    context.set_forkserver_preload(["__main__"])
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, heartbeat_timeout_ms=1000)
    together = context.Barrier(2)
    groups = [context.Process(target=train, args=(kind, g, steps, lighthouse.address(), folder, together)) for g in range(2)]
    for each in groups:
        each.start()
    files = [folder / f"{kind}-group{group}.txt" for group in range(2)]
    while not (lines := committed(files[1])) or lines[-1][0] < steps // 3:
        time.sleep(0.01)
        if any(each.exitcode is not None for each in groups):
            raise SystemExit(f"{kind}: a group has ended before the kill")
    groups[1].kill()
    killed = time.monotonic()
    groups[1].join()
    groups.append(context.Process(target=train, args=(kind, 1, steps, lighthouse.address(), folder)))
    groups[2].start()
    groups[0].join()
    groups[2].join()
    lighthouse.shutdown()
    if groups[0].exitcode or groups[2].exitcode:
        raise SystemExit(f"{kind}: a group has failed: exit codes {groups[0].exitcode} and {groups[2].exitcode}")
    times = [at for _, at, _ in committed(files[0])]
    gaps = [(after, after - before) for before, after in zip(times, times[1:], strict=False)]
    usual, waited = statistics.median(gap for _, gap in gaps), max(gap for after, gap in gaps if after > killed)
    return f"{kind}: longest step of group 0 after the kill {waited:.2f} s; median {usual:.3f} s; both ended at step {steps}"


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else "outputs") / "torchft_ddp"
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.txt"):
        file.unlink()
    os.environ.setdefault("RUST_LOG", "error")  # else torchft's servers log each quorum
    reports = [stall(kind, steps, folder) for kind in KINDS]
    print(*reports, sep="\n")


if __name__ == "__main__":
    main()
