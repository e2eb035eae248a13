"""Context of the loop of docs/guides/compile.md: a small GPT-2 and bytes."""
# SLOW
# REPLACE until=10_000 => until=2
# REPLACE every=100 => every=2
# REPLACE replicas=4 => replicas=1
# REPLACE microbatches=8 => microbatches=2

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import helixrt

config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = held_out = torch.arange(32).view(4, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens.repeat(2, 1)), batch_size=4)


def run(train, **settings):
    """As `helixrt.run`, in the main process alone."""
    if __name__ == "__main__":
        helixrt_run(train, storage="runs", **settings)


helixrt_run, helixrt.run = helixrt.run, run

# BLOCK
