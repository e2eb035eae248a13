"""Train a Hugging Face GPT-2 with DeepSpeed's ZeRO in each of two replicas; any rank may be killed at any time.

    ZERO_STAGE=2 python examples/deepspeed_zero.py [STEPS] [FOLDER]

Inside a replica DeepSpeed partitions the model over two ranks; between replicas training tolerates failures. The loop is that
of a DeepSpeed program. A replica that loses a rank leaves whole, is started again, and each rank fetches its own partition.
"""

import os
import sys
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "outputs"
STAGE = int(os.environ.get("ZERO_STAGE", "2"))
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": STAGE},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1000,
}


def text() -> TensorDataset:
    """The bytes of a source file, in windows of 32."""
    raw = torch.tensor(list(Path(torch.nn.Module.register_buffer.__code__.co_filename).read_bytes()))
    return TensorDataset(raw[: raw.numel() // 32 * 32].view(-1, 32))


def build() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def initialize() -> deepspeed.DeepSpeedEngine:
    model = build()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def train(session: helixrt.Session) -> None:
    engine = session.deepspeed(initialize)  # over the ranks of this replica
    data = text()
    loader = StatefulDataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=True))  # this rank's own share
    for step in session.steps(loader, until=STEPS, accumulate=engine.gradient_accumulation_steps()):
        for (tokens,) in step:
            tokens = tokens.to(session.device)
            loss = engine(tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()  # after the last micro-batch: exchange, agreement, DeepSpeed's own update
        session.log({"loss": step.done.loss, "replicas": len(step.done.contributors)})


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, mesh=helixrt.Mesh(dp_shard=2), storage=FOLDER, seed=1)
    print(f"step {result.step}: {result.folder}")
