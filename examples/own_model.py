"""Train a Hugging Face GPT-2 on two replicas; one of them may be killed at any time.

    python examples/own_model.py [STEPS] [FOLDER] [--pp STAGES] [--cp RANKS] [--tp RANKS]

Each replica runs `train` on its own share of the data. A lost replica is started again, fetches the state from the other one,
and goes on. `--pp 2` cuts the unmodified model over two processes by layers, `--cp 2` by sequences, `--tp 2` by matrices.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import helixrt

parser = argparse.ArgumentParser()
parser.add_argument("steps", nargs="?", type=int, default=40)
parser.add_argument("folder", nargs="?", default="outputs")
for axis in ("--pp", "--cp", "--tp"):
    parser.add_argument(axis, type=int, default=1)
GIVEN, _ = parser.parse_known_args()
CAPTURED = GIVEN.pp * GIVEN.cp > 1
CONFIG = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0)
TEXT = torch.tensor(list(Path(torch.nn.Module.register_buffer.__code__.co_filename).read_bytes()))  # a source file
DATA = TensorDataset(TEXT[: len(TEXT) // 32 * 32].view(-1, 32))


def train(session: helixrt.Session) -> None:
    if CAPTURED:
        with torch.device("meta"):  # no rank ever holds more than its stage
            model = helixrt.compile(GPT2LMHeadModel(CONFIG), loss=lambda o, y: cross_entropy(o.logits.mT, y), microbatches=4)
        tokens = torch.zeros(4, 32, dtype=torch.int64)  # shapes count, values do not
        model = session.parallelize(model, example=helixrt.ExampleBatch(input_ids=tokens, target=tokens))
    else:
        model = session.parallelize(GPT2LMHeadModel(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.register(model=model, optimizers=[optimizer], clip_norm=1.0)
    loader = StatefulDataLoader(DATA, 4, sampler=session.sampler(DATA, shuffle=True), drop_last=CAPTURED)
    for step in session.steps(loader, until=GIVEN.steps):
        for (tokens,) in step:
            tokens = tokens.to(session.device)
            if CAPTURED:  # the next byte of the last one is the first one
                step.train(model, input_ids=tokens, target=tokens.roll(-1, 1))
            else:
                step.backward(model(tokens, labels=tokens).loss * tokens.numel(), weight=tokens.numel())
        session.log({"loss": step.commit().loss})


if __name__ == "__main__":
    mesh = helixrt.Mesh(pp=GIVEN.pp, cp=GIVEN.cp, tp=GIVEN.tp)
    result = helixrt.run(train, replicas=2, mesh=mesh, storage=GIVEN.folder, seed=1)
    print(f"step {result.step}: {result.folder}")
