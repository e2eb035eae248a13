"""Train a Hugging Face GPT-2 on two replicas; one of them may be killed at any time.

    python examples/own_model.py [STEPS] [FOLDER] [--pp STAGES] [--cp RANKS] [--tp RANKS]

`train` is a plain PyTorch program. Each replica runs it on its own share of the data; gradients are summed over replicas
while backward runs; a lost replica is started again, fetches the state from the other one, and goes on. With `--pp 2` a replica
is two processes: the unmodified model is captured as one graph and cut into two pipeline stages. With `--cp 2` each sequence is
cut over two processes, with `--tp 2` the model's matrices; together, each of two stages is several processes.
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


def parallel(session: helixrt.Session, config: GPT2Config) -> torch.nn.Module:
    if not CAPTURED:
        return session.parallelize(GPT2LMHeadModel(config), tp_plan=TP_PLAN)
    with torch.device("meta"):  # no rank ever holds more than its stage
        model = helixrt.compile(GPT2LMHeadModel(config), loss=lambda out, y: cross_entropy(out.logits.mT, y), microbatches=4)
    tokens = torch.zeros(4, 32, dtype=torch.int64)  # shapes count, values do not
    return session.parallelize(model, tp_plan=TP_PLAN, example=helixrt.ExampleBatch(input_ids=tokens, target=tokens))


def train(session: helixrt.Session) -> None:
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    if GIVEN.cp > 1:
        config.attn_pdrop = 0.0  # cp ranks have no dropout in attention
    model = parallel(session, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.register(model=model, optimizers=[optimizer], clip_norm=1.0)
    data = text()
    loader = StatefulDataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=True), drop_last=CAPTURED)
    for step in session.steps(loader, until=GIVEN.steps):
        for (tokens,) in step:
            if CAPTURED:  # the next byte of the last one is the first one
                step.train(model, input_ids=tokens, target=tokens.roll(-1, 1))
            else:
                loss = model(tokens, labels=tokens).loss  # a mean over the batch's tokens
                step.backward(loss * tokens.numel(), weight=tokens.numel())
        done = step.commit()
        session.log({"loss": done.loss, "replicas": len(done.contributors)})


if __name__ == "__main__":
    mesh = helixrt.Mesh(pp=GIVEN.pp, cp=GIVEN.cp, tp=GIVEN.tp)
    result = helixrt.run(train, replicas=2, mesh=mesh, storage=GIVEN.folder, seed=1)
    print(f"step {result.step}: {result.folder}")
