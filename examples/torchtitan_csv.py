"""A schedule that helixrt has planned, run by PyTorch's own pipeline runtime.

    torchrun --nproc-per-node 2 examples/torchtitan_csv.py [order.csv]

Without a file the order is planned here, for a slow link from stage 0 to stage 1. A file must have as many stages as there are
processes, and 6 micro-batches. torchtitan reads the same file: set
`pipeline_parallel_schedule_csv` to its path and `pipeline_parallel_schedule` to "PipelineScheduleMulti". The last line compares
the gradients with those of the whole model in one process.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # what torchtitan loads such files with

from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.exchange import torch_csv
from helixrt.schedule.planner.plan import plan

WIDTH, MICROBATCHES = 16, 6


def order(stages: int) -> Path:
    """The file that is given, or a planned order for messages of 20 ms between stages 0 and 1; F, B and W take 10 ms."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    found = plan(with_delays(uniform(stages, 10, 10, 10), {(0, 1): 20.0, (1, 0): 20.0}), MICROBATCHES)
    file = Path(f"order-{os.environ['RANK']}.csv")
    file.write_text(torch_csv.write(found.schedule))
    print(f"planned: {found.makespan_ms:g} ms; no order takes less than {found.lower_bound_ms:g} ms")
    return file


def main() -> None:
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)])
    x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH).unbind(0)
    mine = copy.deepcopy(whole[rank])

    stage = PipelineStage(mine, rank, stages, torch.device("cpu"))
    schedule = _PipelineScheduleRuntime([stage], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    file = order(stages)
    schedule._load_csv(str(file))
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == stages - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()

    nn.functional.mse_loss(whole(x), y).backward()
    same = all(
        torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in zip(mine.parameters(), whole[rank].parameters(), strict=True)
    )
    print(f"rank {rank}: gradients equal to those of one process: {same}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
