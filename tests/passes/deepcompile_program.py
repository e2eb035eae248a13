"""Train a few steps with a DeepSpeed engine, alone on one device; test_deepcompile_gpu.py starts it in a process of its own.

    python deepcompile_program.py plain|deepcompile|hidden STAGE eager|inductor DTYPE OUTPUT

DeepCompile changes Dynamo, Inductor and autograd for the whole process. In OUTPUT, as JSON: the loss of each step, the
parameters' checksum, and for each graph its operators in order before and after the pass.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._inductor.graph import GraphLowering

from helixrt.passes import deepcompile

LAYERS, WIDTH, ROWS, STEPS = 6, 64, 32, 4
COMPILED = {1: "zero1_compile", 2: "zero2_compile", 3: "zero3_compile"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.blocks(x).float(), target.float())


def settings(stage: int, dtype: str, compiled: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": 10_000,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1 << 16},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}},
        "compile": {"deepcompile": compiled},
        **({"bf16": {"enabled": True}} if dtype == "bfloat16" else {}),
    }


class Recorder:
    """Notes the order of a graph's operators; returns no graph, so that DeepCompile goes on with the one it has."""

    def __init__(self) -> None:
        self.graphs: list[dict[str, Any]] = []

    def __call__(self, gm: fx.GraphModule, graph_id: int, *others: Any) -> None:
        order = [(node.name, str(node.target)) for node in gm.graph.nodes if node.op == "call_function"]
        self.graphs.append({"backward": bool(others[-1]), "order": order})


def train(run: str, stage: int, backend: str, dtype: str) -> dict[str, Any]:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(get_accelerator().communication_backend_name(), store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = Model()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(stage, dtype, run != "plain")
    )[0]
    before, after, programs = Recorder(), Recorder(), list[str]()
    GraphLowering.save_output_code = staticmethod(programs.append)  # type: ignore[method-assign]  # as run_and_get_code does
    if run == "hidden":
        deepcompile.register(engine)
        engine.compile(backend=backend, schedule=[(0, [COMPILED[stage], before, deepcompile.NAME, after])])
    elif run == "deepcompile":
        engine.compile(backend=backend, schedule=[(0, [COMPILED[stage]])])
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        x, target = torch.randn(2, ROWS, WIDTH, generator=generator).to(engine.device, getattr(torch, dtype))
        loss = engine(x, target)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    active = bool(engine.is_deepcompile_active())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        weights = {name: parameter.double().sum().item() for name, parameter in model.named_parameters()}
    engine.destroy()
    return {
        "active": active,
        "losses": losses,
        "weights": weights,
        "before": before.graphs,
        "after": after.graphs,
        "programs": programs,
    }


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    Path(sys.argv[5]).write_text(json.dumps(train(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])))
