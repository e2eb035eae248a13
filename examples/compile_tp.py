"""A tensor-parallel model on two ranks, compiled: while one micro-batch communicates, another computes.

    torchrun --nproc-per-node 2 examples/compile_tp.py [STEPS]

The model is cut by PyTorch's own `parallelize_module`. The last line compares the gradients with those of a plain loop.
"""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import helixrt
import helixrt.compile  # before init_process_group: see docs/guides/strands.md

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(32) for _ in range(2)])
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (model, plain):
        for block in each:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    model = helixrt.compile(model, loss=F.mse_loss, microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(2, 8, 16, 32).unbind(0)
    gradients = []
    for _ in range(STEPS):
        loss = model.train_step(x, target=y)  # gradients are in p.grad
        gradients.append([local(p.grad).clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()

    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(plain(a), b) / 4).backward()
    same = all(torch.allclose(g, local(p.grad), 1e-4, 1e-6) for g, p in zip(gradients[0], plain.parameters(), strict=True))
    if dist.get_rank() == 0:
        print(f"{model.explain().state}; loss {loss:.3f}; gradients of step 1 equal to a plain loop's: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
