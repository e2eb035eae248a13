"""Train a Hugging Face GPT-2 on two replicas; one of them may be killed at any time.

    python examples/own_model.py [STEPS] [FOLDER] [--tp RANKS]

`train` is a plain PyTorch program. Each replica runs it on its own share of the data; gradients are summed over replicas
while backward runs; a lost replica is started again, fetches the state from the other one, and goes on. With --tp a replica is
several ranks, over which the matrices are cut.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import helixrt

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int, nargs="?", default=40)
parser.add_argument("folder", nargs="?", default="outputs")
parser.add_argument("--tp", type=int, default=1)
OPTIONS = parser.parse_known_args()[0]
TP_PLAN = {  # GPT-2 has none of its own, as its queries, keys and values are one matrix: each rank gathers them
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn.c_attn": "colwise_gather_output",
    "transformer.h.*.attn.c_proj": "rowwise_split_input",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def text() -> TensorDataset:
    """The bytes of a source file, in windows of 32."""
    raw = torch.tensor(list(Path(torch.nn.Module.register_buffer.__code__.co_filename).read_bytes()))
    return TensorDataset(raw[: raw.numel() // 32 * 32].view(-1, 32))


def train(session: helixrt.Session) -> None:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = session.parallelize(GPT2LMHeadModel(config), tp_plan=TP_PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.register(model=model, optimizers=[optimizer], clip_norm=1.0)
    data = text()
    loader = StatefulDataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=True))
    for step in session.steps(loader, until=OPTIONS.steps):
        for (tokens,) in step:
            loss = model(tokens, labels=tokens).loss  # a mean over the batch's tokens
            step.backward(loss * tokens.numel(), weight=tokens.numel())
        done = step.commit()
        session.log({"loss": done.loss, "replicas": len(done.contributors)})


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, mesh=helixrt.Mesh(tp=OPTIONS.tp), storage=OPTIONS.folder, seed=1)
    print(f"step {result.step}: {result.folder}")
