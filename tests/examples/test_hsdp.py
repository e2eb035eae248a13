"""examples/hsdp.py: one rank of a replica of several is killed; each rank fetches its shard, and the result is exact."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from helixrt.engines.random_state import set_random_state
from helixrt.job.sampler import StreamSampler
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import Kind, read_events
from tests.examples.runs import KILLED, ROOT, check_ranks, check_rejoined, imported, run
from tests.job.lineage_oracle import digest_of_ranks, reported

EXAMPLE = ROOT / "examples" / "hsdp.py"
SEED, REPLICAS, ROWS = 1, 2, 4


class OneProcess:
    """The example in plain PyTorch, in one process that holds the whole model. Sums, the norm and the update are taken shard by
    shard, as the ranks take them: inside a replica for each micro-batch, then over micro-batches, then over replicas."""

    def __init__(self, module: ModuleType, ranks: int) -> None:
        torch.set_num_threads(1)  # as the ranks have: sums over elements depend on it
        torch.manual_seed(SEED)
        self.model, self.ranks, self.accumulate = module.build(), ranks, module.ACCUMULATE
        self.parameters = list(self.model.parameters())
        self.shards = [[nn.Parameter(part.clone()) for part in self._cut(p.detach())] for p in self.parameters]
        self.optimizers = [torch.optim.AdamW([parts[r] for parts in self.shards], lr=1e-3) for r in range(ranks)]
        self.windows = module.text().tensors[0]
        streams = REPLICAS * ranks
        self.samplers = [StreamSampler(len(self.windows), streams, s, shuffle=True, seed=SEED) for s in range(streams)]
        batches = -(-len(self.samplers[0]) // ROWS)
        self.usable = batches - batches % self.accumulate

    def _cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        parts = list(whole.chunk(self.ranks))
        return parts + [whole[:0]] * (self.ranks - len(parts))

    def gradients(self, replica: int, rank: int, position: int) -> tuple[list[torch.Tensor], int]:
        sampler = self.samplers[replica * self.ranks + rank]
        sampler.set_epoch(position // self.usable)
        first = ROWS * (position % self.usable)
        tokens = self.windows[sampler.order()[first : first + ROWS]]
        set_random_state(SEED, replica, rank, position)
        loss = self.model(tokens, labels=tokens).loss * tokens.numel()
        return list(torch.autograd.grad(loss, self.parameters)), tokens.numel()

    def step(self, before: CommitRecord, record: CommitRecord) -> None:
        total: list[torch.Tensor] | None = None
        weight = 0
        for replica in record.summed:
            of_replica: list[torch.Tensor] | None = None
            first = before.positions[replica]
            for position in range(first, first + self.accumulate):
                given = [self.gradients(replica, rank, position) for rank in range(self.ranks)]
                weight += sum(items for _, items in given)
                summed = [torch.stack(same).sum(0) for same in zip(*(gradients for gradients, _ in given), strict=True)]
                of_replica = summed if of_replica is None else [a + b for a, b in zip(of_replica, summed, strict=True)]
            assert of_replica is not None
            total = of_replica if total is None else [a + b for a, b in zip(total, of_replica, strict=True)]
        assert total is not None
        for parts, gradient in zip(self.shards, total, strict=True):
            for part, piece in zip(parts, self._cut(gradient), strict=True):
                part.grad = piece / float(weight)
        norms = [nn.utils.get_total_norm([parts[r].grad for parts in self.shards]) for r in range(self.ranks)]
        norm = torch.stack([n.double().square() for n in norms]).sum().sqrt().float()
        for r, optimizer in enumerate(self.optimizers):
            nn.utils.clip_grads_with_norm_([parts[r] for parts in self.shards], 1.0, norm)
            optimizer.step()
        with torch.no_grad():
            for parameter, parts in zip(self.parameters, self.shards, strict=True):
                parameter.copy_(torch.cat(list(parts)))

    def digest(self) -> str:
        """As the report gives it for a replica of several ranks."""
        names = [name for name, _ in self.model.named_parameters()]
        held = [{name: parts[r] for name, parts in zip(names, self.shards, strict=True)} for r in range(self.ranks)]
        return digest_of_ranks(held)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 70


@pytest.mark.system
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("ranks", "steps"), [(2, 40), pytest.param(4, 24, marks=pytest.mark.slow)])
def test_a_replica_that_loses_a_rank_returns_whole_and_the_result_is_that_of_one_process(
    tmp_path: Path, ranks: int, steps: int
) -> None:
    done = run(KILLED, steps, tmp_path, EXAMPLE, "", REPLICAS, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = (tmp_path / "latest").resolve()
    module = imported(EXAMPLE)

    records = check_rejoined(folder, steps, module.ACCUMULATE)
    ids = [set(json.loads(file.read_text())) for file in sorted(tmp_path.glob("ids.*.json"))]
    assert len(ids) == REPLICAS * ranks and sum(map(len, ids)) == len(set.union(*ids)), "each rank has data of its own"

    names = ["pp0", *(f"pp0.dp{rank}" for rank in range(1, ranks))]
    check_ranks(folder, steps, module.ACCUMULATE, names)
    fetched = [fetched_bytes(folder / "flight" / f"r1.{name}.inc1.story.jsonl") for name in names]
    whole = sum(each[-1] for each in fetched)
    assert all(abs(nbytes - whole / ranks) < 0.05 * whole / ranks for each in fetched for nbytes in each), fetched

    final = reported(folder)
    assert final[0] == final[1]
    assert len({r["state_digest"] for r in json.loads((folder / "report.json").read_text())["replicas"]}) == 1
    if ranks == 2:  # the order in which Gloo adds up more than two ranks is its own
        oracle = OneProcess(module, ranks)
        for before, record in zip(records, records[1:], strict=False):
            oracle.step(before, record)
        assert final[0] == oracle.digest()


def fetched_bytes(flight: Path) -> list[int]:
    """Of each fetch of a state that ended."""
    events = list(read_events(flight))
    states = {event.detail["lineage"] for event in events if event.kind is Kind.FETCH_BEGIN and event.detail["what"] == "state"}
    found = [e.detail["bytes"] for e in events if e.kind is Kind.FETCH_END and e.detail["lineage"] in states]
    assert found, f"{flight.name} has no fetch of a state"
    return found
