"""Linear layers of which each tensor-parallel rank holds a part (Shoeybi et al., 2019).

A block's first matrices are cut by output features (`ColumnLinear`), its last by input features (`RowLinear`), so that
one exchange at its start and one at its end are all there is. In: hidden states [batch, seq, in]; with sequence
parallelism ColumnLinear takes and RowLinear gives this rank's slice of seq. Alone, both are `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from helixrt.parallel.collective_functions import cut, enter, gather, leave, scatter, uncut
from helixrt.train.models.parallel import Layout, ParallelGroups, Shard

SEQUENCE = 1  # the dimension of hidden states that sequence parallelism cuts


def into_block(x: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """From the activations between blocks to the input of every tensor-parallel rank."""
    if groups.tp is None:
        return x
    return gather(x, SEQUENCE, groups.tp.name, groups.tp.size) if groups.sequence else enter(x, groups.tp.name)


def out_of_block(x: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """From each tensor-parallel rank's summand to the activations between blocks."""
    if groups.tp is None:
        return x
    return scatter(x, SEQUENCE, groups.tp.name, groups.tp.size) if groups.sequence else leave(x, groups.tp.name)


def cut_sequence(x: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """From the embeddings, replicated over tp, to the activations between blocks."""
    if groups.tp is None or not groups.sequence:
        return x
    return cut(x, SEQUENCE, groups.tp.name, groups.tp.rank, groups.tp.size)


def whole_sequence(x: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """From the activations between blocks to the input of the output head, replicated over tp."""
    if groups.tp is None or not groups.sequence:
        return x
    return uncut(x, SEQUENCE, groups.tp.name, groups.tp.rank, groups.tp.size)


def sequence_length(x: torch.Tensor, groups: ParallelGroups) -> int:
    """Positions that blocks work on, for the positions of activations between them."""
    return x.shape[SEQUENCE] * (groups.tp_size if groups.sequence else 1)


def norm_layout(module: nn.Module, names: Iterable[str], groups: ParallelGroups) -> Mapping[str, Layout]:
    """Layouts of those norms that `module` has: with sequence parallelism each rank's sees a part of the positions."""
    norms = [(name, getattr(module, name)) for name in names if hasattr(module, name)]
    return {f"{name}.{key}": Layout(partial=groups.sequence) for name, norm in norms for key, _ in norm.named_parameters()}


def embedding(rows: int, dim: int) -> nn.Embedding:
    """One whose weight is whatever memory held: `build` sets it. (On the meta device nn.Embedding's own initialization
    would load torch's compiler, which takes as long as torch.)"""
    return nn.Embedding.from_pretrained(torch.empty(rows, dim), freeze=False)


class ColumnLinear(nn.Linear):
    """Output features cut over tp; `sections` (full sizes) are outputs that are each cut on their own."""

    def __init__(self, inputs: int, sections: tuple[int, ...], groups: ParallelGroups, bias: bool = True) -> None:
        super().__init__(inputs, sum(sections) // groups.tp_size, bias)
        self.sections, self.groups = sections, groups

    def layout(self) -> Mapping[str, Layout]:
        rows = Layout((Shard("tp", 0, self.sections),))
        return {"weight": rows, "bias": rows}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(into_block(x, self.groups))


class RowLinear(nn.Linear):
    """Input features cut over tp; the bias is whole, and added after the sum."""

    def __init__(self, inputs: int, outputs: int, groups: ParallelGroups, bias: bool = True) -> None:
        super().__init__(inputs // groups.tp_size, outputs, bias)
        self.groups = groups

    def layout(self) -> Mapping[str, Layout]:
        return {"weight": Layout((Shard("tp", 1),)), "bias": Layout(partial=self.groups.sequence)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.groups.tp is None:
            return super().forward(x)
        x = out_of_block(F.linear(x, self.weight), self.groups)
        return x if self.bias is None else x + self.bias


class StackedLinear(nn.Module):
    """One matrix for each expert, [experts, out, in], without biases; experts cut over ep, one more dimension over tp."""

    def __init__(self, experts: int, inputs: int, sections: tuple[int, ...], groups: ParallelGroups, cut: str) -> None:
        super().__init__()
        assert cut in ("inputs", "outputs")
        outputs = sum(sections)
        if cut == "outputs":
            outputs, self.within = outputs // groups.tp_size, Shard("tp", 1, sections)
        else:
            inputs, self.within = inputs // groups.tp_size, Shard("tp", 2)
        self.weight = nn.Parameter(torch.empty(experts // groups.ep_size, outputs, inputs))

    def layout(self) -> Mapping[str, Layout]:
        return {"weight": Layout((Shard("ep", 0), self.within), expert=True)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[experts, tokens, in] to [experts, tokens, out]."""
        # The weight first, so that its gradient is laid out as itself: to add a transposed one takes longer than to make it.
        return torch.bmm(self.weight, x.transpose(1, 2)).transpose(1, 2).contiguous()

    def of_rows(self, rows: torch.Tensor, loads: Sequence[int]) -> torch.Tensor:
        """[tokens, in] to [tokens, out]; the first `loads[0]` rows are the first expert's, and so on."""
        parts = zip(rows.split(list(loads)), self.weight.unbind(0), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts])
