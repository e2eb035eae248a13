"""Context of the layouts of docs/concepts/mesh.md: one part with the named parameters."""
# REPLACE microbatches=8 => microbatches=2

import torch

import helixrt


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.up(self.norm(x))


parts, loss = [Part()], torch.nn.functional.mse_loss
example = boundary = torch.zeros(1, 4)
# BLOCK
assert set(layouts(parts[0])) <= dict(parts[0].named_parameters()).keys()  # noqa: F821, made in the block
