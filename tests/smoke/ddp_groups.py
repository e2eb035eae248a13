"""Two ranks train one model by DistributedDataParallel, over Gloo and over helix: `torchrun --nproc-per-node 2 ddp_groups.py`.

Prints "equal" if the parameters after some steps are bitwise the same: of two summands each sum has one order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def trained(backend: str) -> torch.Tensor:
    """All parameters after four steps, flat."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), process_group=dist.new_group(backend=backend)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    same = torch.equal(trained("gloo"), trained("helix"))
    if dist.get_rank() == 0:
        print("equal" if same else "different")
    dist.destroy_process_group()
