"""The formula of a model's operations against torch's counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helixrt.train.config import ModelConfig
from helixrt.train.flops import flops_per_token, forward_flops_per_token
from helixrt.train.models.build import build_chunk

MODELS = {
    "gpt": ModelConfig("gpt", layers=2, dim=32, heads=4, ffn=96, vocab=64),
    "tied": ModelConfig("gpt", layers=1, dim=32, heads=4, ffn=96, vocab=64, tied=True),
    "llama": ModelConfig("llama", layers=2, dim=32, heads=4, kv_heads=2, ffn=80, vocab=64),
}


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_what_torch_counts(name: str) -> None:
    model, seq_len = MODELS[name], 16
    module = build_chunk(model, seq_len, 0, 1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the counter knows no flash kernel of a CPU
        module(torch.zeros(3, seq_len, dtype=torch.int64))
    assert counter.get_total_flops() == 3 * seq_len * forward_flops_per_token(model, seq_len)
    assert flops_per_token(model, seq_len) == 3 * forward_flops_per_token(model, seq_len)


def test_a_token_counts_with_the_experts_that_it_chooses() -> None:
    dense, experts = (ModelConfig("llama", layers=2, dim=32, heads=4, kv_heads=4, ffn=80, experts=e) for e in (0, 4))
    network = 3 * 32 * 80
    assert forward_flops_per_token(experts, 16) - forward_flops_per_token(dense, 16) == 2 * 2 * (network + 32 * 4)
