"""Train a Hugging Face GPT-2 on two replicas; one of them may be killed at any time.

    python examples/own_model.py [STEPS] [FOLDER]

`train` is a plain PyTorch program. Each replica runs it on its own share of the data; gradients are summed over replicas
while backward runs; a lost replica is started again, fetches the state from the other one, and goes on.
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


def text() -> TensorDataset:
    """The bytes of a source file, in windows of 32."""
    raw = torch.tensor(list(Path(torch.nn.Module.register_buffer.__code__.co_filename).read_bytes()))
    return TensorDataset(raw[: raw.numel() // 32 * 32].view(-1, 32))


def train(session: helixrt.Session) -> None:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = session.parallelize(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.register(model=model, optimizers=[optimizer], clip_norm=1.0)
    data = text()
    loader = StatefulDataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=True))
    for step in session.steps(loader, until=STEPS):
        for (tokens,) in step:
            loss = model(tokens, labels=tokens).loss  # a mean over the batch's tokens
            step.backward(loss * tokens.numel(), weight=tokens.numel())
        done = step.commit()
        session.log({"loss": done.loss, "replicas": len(done.contributors)})


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, storage=FOLDER, seed=1)
    print(f"step {result.step}: {result.folder}")
