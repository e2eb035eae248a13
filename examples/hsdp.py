"""Train a Hugging Face GPT-2 on two replicas of several ranks each; any rank may be killed at any time.

    python examples/hsdp.py [STEPS] [FOLDER]

Inside a replica FSDP2 shards the model over two ranks; between replicas training tolerates failures: this is HSDP.
A replica that loses a rank leaves whole, is started again, and each of its ranks fetches its own shard of the state.
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "outputs"
ACCUMULATE = 2


def text() -> TensorDataset:
    """The bytes of a source file, in windows of 32."""
    raw = torch.tensor(list(Path(torch.nn.Module.register_buffer.__code__.co_filename).read_bytes()))
    return TensorDataset(raw[: raw.numel() // 32 * 32].view(-1, 32))


def build() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def train(session: helixrt.Session) -> None:
    model = session.parallelize(build())  # each block, then the rest, over the ranks of this replica
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.register(model=model, optimizers=[optimizer], clip_norm=1.0)
    data = text()
    loader = StatefulDataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=True))  # this rank's own share
    for step in session.steps(loader, until=STEPS, accumulate=ACCUMULATE):
        for (tokens,) in step:
            tokens = tokens.to(session.device)
            loss = model(tokens, labels=tokens).loss  # a mean over the batch's tokens
            step.backward(loss * tokens.numel(), weight=tokens.numel())
        done = step.commit()
        session.log({"loss": done.loss, "replicas": len(done.contributors)})  # over all ranks of all replicas


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, mesh=helixrt.Mesh(dp_shard=2), storage=FOLDER, seed=1)
    print(f"step {result.step}: {result.folder}")
