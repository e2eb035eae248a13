"""The trivial engine: a plain model, a plain backward, momentum SGD, one bucket.

It shows that the `Engine` contract asks for nothing that only the pipeline has. Tests get it through the
fixture `plain_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from helixrt.errors import Fatal
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import BatchEngine, State, Update, WorkResult


class PlainEngine(BatchEngine):
    """Predicts the next of `vocab` symbols from the last one, on one rank."""

    def __init__(self, batch_at: Callable[[int], torch.Tensor], *, vocab: int, seed: int, lr: float = 0.5) -> None:
        self.batch_at, self.lr = batch_at, lr
        self.not_applied = 0
        self.model = nn.Sequential(nn.Embedding(vocab, 8), nn.Linear(8, vocab))
        generator = torch.Generator().manual_seed(seed)
        self.momentum: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            nn.init.normal_(parameter, 0.0, 0.1, generator=generator)
            self.momentum[name] = torch.zeros_like(parameter)
        self._bucket = torch.zeros(sum(p.numel() for p in self.model.parameters()))

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        return [self._bucket]

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def begin(self, on_bucket: Callable[[int], None]) -> None:
        self._on_bucket = on_bucket

    def compute(self, position: int) -> None:
        tokens = self.batch_at(position)
        loss = self._loss(tokens)
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        torch.cat([g.flatten() for g in grads], out=self._bucket)
        self._result = WorkResult(loss.item(), tokens[:, 1:].numel())
        self._on_bucket(0)

    def end(self) -> WorkResult:
        return self._result

    @torch.no_grad()
    def apply(self, record: CommitRecord, reduced: Sequence[torch.Tensor] | None) -> Update | None:
        if reduced is None:
            self.not_applied += 1
            return None
        mean = reduced[0] / len(record.summed)
        norm = mean.norm().item()
        if not norm < float("inf"):
            raise Fatal(f"the gradient of step {record.step} is not finite")
        sizes = [p.numel() for p in self.model.parameters()]
        for (name, parameter), grad in zip(self.model.named_parameters(), mean.split(sizes), strict=True):
            self.momentum[name].mul_(0.9).add_(grad.view_as(parameter))
            parameter.sub_(self.momentum[name], alpha=self.lr)
        return Update(norm, self.lr)

    def state(self) -> State:
        parameters = {f"parameter/{n}": p.detach() for n, p in self.model.named_parameters()}
        return State(parameters | {f"momentum/{n}": m for n, m in self.momentum.items()})

    def load(self, state: State) -> None:
        live = self.state().tensors
        if missing := live.keys() - state.tensors.keys():
            raise Fatal(f"the state to load lacks {sorted(missing)}")
        for name, tensor in live.items():
            tensor.copy_(state.tensors[name])

    @torch.no_grad()
    def evaluate(self, batches: int) -> tuple[float, int]:
        tokens = [self.batch_at(10_000 + i) for i in range(batches)]
        return sum(self._loss(t).item() for t in tokens) / batches, sum(t[:, 1:].numel() for t in tokens)
