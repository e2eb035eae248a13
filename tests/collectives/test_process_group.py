"""The c10d backend "helix" in real processes: what Gloo gives, bit by bit, and what stands on top of a group.

The processes start once; each test asks them for one part.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks_context import ranks_context

SIZE = 3
DEADLINE_S = 60.0


# ---------------------------------------------------------------- in the ranks' processes


def _rank(pipe: Connection, rank: int, folder: str) -> None:
    """Answers the names of functions below with what they return, or with the error."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import helixrt.collectives  # noqa: F401, registers the backend

    dist.init_process_group("helix", init_method=f"file://{folder}/helix", rank=rank, world_size=SIZE)
    gloo = dist.new_group(backend="gloo")
    while (name := pipe.recv()) is not None:
        try:
            pipe.send(globals()[name](gloo))
        except BaseException:
            pipe.send(AssertionError(traceback.format_exc()))
    dist.destroy_process_group()
    pipe.send("ended")


def same_as_gloo(gloo: Any) -> list[str]:
    """What differs. Gloo gets contiguous tensors, and where it refuses a type, the same elements in another."""
    from tests.collectives.group_cases import CASES, as_it_is, in_strides, of_type

    wrong, refused = [], set()
    for name, case in CASES.items():
        ours = case.run(dist.group.WORLD, in_strides if case.strided else as_it_is, case.dtype)
        try:
            theirs = case.run(gloo, as_it_is, case.dtype)
        except RuntimeError as error:
            assert "scalar type" in str(error) or "not supported" in str(error), (name, error)
            refused.add(str(case.dtype))
            theirs = [of_type(tensor, case.dtype) for tensor in case.run(gloo, as_it_is, case.wide)]
        same = len(ours) == len(theirs) and all(
            a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=False)
        )
        wrong += [] if same else [name]
    return [f"of {len(CASES)} cases, {sorted(refused)} compared by another type", *wrong]


def on_a_card(gloo: Any) -> None:
    """CUDA tensors, strided ones too, give what host tensors give; DDP's gradients come out of futures.

    Of operations besides the sum in one type each: for every type and operation Triton compiles kernels.
    """
    from tests.collectives.group_cases import CASES, as_it_is, in_strides

    me = dist.get_rank()
    one_type = dict.fromkeys(("max", "min", "product"), torch.float32) | dict.fromkeys(("and", "or", "xor"), torch.int64)
    for name, case in CASES.items():
        if name.startswith("objects"):
            continue
        if "reduce" in name and case.dtype is not one_type.get(name.split()[1], case.dtype):
            continue
        lay = in_strides if case.strided else as_it_is
        ours = case.run(dist.group.WORLD, lambda tensor, lay=lay: lay(tensor.cuda()), case.dtype)
        theirs = case.run(dist.group.WORLD, as_it_is, case.dtype)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)), name
    model = nn.parallel.DistributedDataParallel(_model().cuda(), bucket_cap_mb=0.001)
    for _ in range(2):
        model.zero_grad()
        model(_batch()[4 * me : 4 * me + 4].cuda()).square().mean().backward()
    for ours, theirs in zip(model.parameters(), _whole_gradients(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs)


def what_gloo_has_not(gloo: Any) -> None:
    """Mean, booleans, bitwise operations, strides, lists of uneven parts; older names."""
    me, group = dist.get_rank(), dist.group.WORLD
    mean = torch.tensor([1.0, 2.0]) * (me + 1)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.equal(mean, torch.tensor([2.0, 4.0]))
    bits = torch.tensor([1 << me, 7])
    for op, expected in ((dist.ReduceOp.BOR, [7, 7]), (dist.ReduceOp.BAND, [0, 7]), (dist.ReduceOp.BXOR, [7, 7])):
        got = bits.clone()
        dist.all_reduce(got, op)
        assert got.tolist() == expected, op
    truth = torch.tensor([me == 1, False, True])
    dist.all_reduce(truth)
    assert truth.tolist() == [True, False, True]

    short = torch.tensor([me, -1], dtype=torch.int16)
    dist.all_reduce(short, dist.ReduceOp.MAX)
    assert short.tolist() == [2, -1]

    wide = torch.arange(24.0).reshape(4, 6) * (me + 1)
    strided = wide[:, ::2]
    dist.all_reduce(strided)
    assert torch.equal(wide[:, ::2], torch.arange(24.0).reshape(4, 6)[:, ::2] * 6)
    assert torch.equal(wide[:, 1::2], torch.arange(24.0).reshape(4, 6)[:, 1::2] * (me + 1))  # and nothing between
    transposed = (torch.arange(6.0).reshape(2, 3) + me).t()
    out = torch.zeros(SIZE * 2, 3).t()
    parts = [torch.zeros(2, 3).t() for _ in range(SIZE)]
    dist.all_gather(parts, transposed)
    assert all(torch.equal(part, (torch.arange(6.0).reshape(2, 3) + r).t()) for r, part in enumerate(parts))
    del out

    gives = [torch.full((me + r,), float(10 * me + r)) for r in range(SIZE)]
    takes = [torch.zeros(me + r) for r in range(SIZE)]
    dist.all_to_all(takes, gives)
    assert all(torch.equal(taken, torch.full((me + r,), 10.0 * r + me)) for r, taken in enumerate(takes))
    uneven = [torch.zeros(r + 1) for r in range(SIZE)]
    dist.all_gather(uneven, torch.full((me + 1,), float(me)))
    assert all(torch.equal(part, torch.full((r + 1,), float(r))) for r, part in enumerate(uneven))
    summed = torch.zeros(me + 1)
    dist.reduce_scatter(summed, [torch.full((r + 1,), float(r + me)) for r in range(SIZE)])
    assert torch.equal(summed, torch.full((me + 1,), 3.0 * me + 3))

    whole = torch.zeros(SIZE * 4)
    whole[4 * me : 4 * me + 4] = me + 1  # from a part of the output itself, as FSDP does
    group._allgather_base(whole, whole[4 * me : 4 * me + 4]).wait()
    assert torch.equal(whole, torch.arange(1.0, SIZE + 1).repeat_interleave(4))
    part = torch.zeros(4)
    group._reduce_scatter_base(part, whole).wait()
    assert torch.equal(part, torch.full((4,), 3.0 * (me + 1)))

    for refused, error, why in (
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG), ValueError, "a mean needs"),
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BOR), ValueError, "needs integers"),
        (lambda: group._allgather_base(torch.zeros(5), torch.zeros(2)), ValueError, "needs 3 times"),
        (lambda: group.send([torch.zeros(5)], me, 0), ValueError, "no other rank"),
        (lambda: dist.recv(torch.zeros(5)), NotImplementedError, "give `src`"),
    ):
        with pytest.raises(error, match=why):
            refused()
    dist.barrier()  # after refusals all ranks are still in step


def close_to_gloo(gloo: Any) -> None:
    """Random numbers: the order of the sum may differ, all ranks get the same bits."""
    me = dist.get_rank()
    for length in (5, 30_001, 400_003):
        source = torch.randn(length, generator=torch.Generator().manual_seed(me))
        ours, theirs = source.clone(), source.clone()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=gloo)
        torch.testing.assert_close(ours, theirs)
        mine = [torch.zeros_like(ours) for _ in range(SIZE)]
        dist.all_gather(mine, ours, group=gloo)
        assert all(torch.equal(each, ours) for each in mine)


def functional(gloo: Any) -> None:
    import torch.distributed._functional_collectives as funcol

    me, group = dist.get_rank(), dist.group.WORLD
    given = torch.full((4,), float(me))
    assert torch.equal(funcol.all_reduce(given, "sum", group) + 0, torch.full((4,), 3.0))
    assert torch.equal(given, torch.full((4,), float(me)))
    gathered = funcol.all_gather_tensor(given, 0, group) + 0
    assert torch.equal(gathered, torch.arange(float(SIZE)).repeat_interleave(4))
    assert torch.equal(funcol.reduce_scatter_tensor(gathered, "sum", 0, group) + 0, torch.full((4,), 3.0 * me))
    assert torch.equal(funcol.broadcast(given, 2, group) + 0, torch.full((4,), 2.0))
    several = funcol.all_reduce_coalesced([given, given + 1], "avg", group)
    assert torch.equal(several[0] + 0, torch.ones(4)) and torch.equal(several[1] + 0, torch.full((4,), 2.0))
    both = funcol.all_gather_into_tensor_coalesced([given, given + 1], group)
    assert all(torch.equal(each + 0, gathered + i) for i, each in enumerate(both))
    both = funcol.reduce_scatter_tensor_coalesced([gathered, gathered + 1], "sum", [0, 0], group)
    assert all(torch.equal(each + 0, torch.full((4,), 3.0 * (me + i))) for i, each in enumerate(both))
    exchanged = funcol.all_to_all_single(gathered, [4] * SIZE, [4] * SIZE, group) + 0
    assert torch.equal(exchanged, torch.full((12,), float(me)))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 6))


def _batch() -> torch.Tensor:
    return torch.randn(SIZE * 4, 8, generator=torch.Generator().manual_seed(5))


def _whole_gradients() -> list[torch.Tensor]:
    model = _model()
    model(_batch()).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def ddp(gloo: Any) -> None:
    me = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.001)
    for _ in range(2):
        model.zero_grad()
        model(_batch()[4 * me : 4 * me + 4]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), _whole_gradients(), strict=True):
        torch.testing.assert_close(ours.grad, theirs)


def fsdp(gloo: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    me, model = dist.get_rank(), _model()
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole = _model()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, whole)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(_batch()[4 * me : 4 * me + 4]).square().mean().backward()
        whole(_batch()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        torch.testing.assert_close(ours.full_tensor(), theirs)


def dtensor(gloo: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (SIZE,))
    model = _model()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss = model(_batch()).square().mean()
    loss.backward()
    for ours, theirs in zip(model.parameters(), _whole_gradients(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs)
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    split = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(split.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]).to_local(), whole)


def subgroups(gloo: Any) -> None:
    me = dist.get_rank()
    pair = dist.new_group([0, 2], backend="helix", timeout=timedelta(seconds=DEADLINE_S))
    if me != 1:
        value = torch.ones(3) * (me + 1)
        dist.all_reduce(value, group=pair)
        assert torch.equal(value, torch.full((3,), 4.0))
        dist.destroy_process_group(pair)


# ---------------------------------------------------------------- the tests


class Ranks:
    def __init__(self, folder: Path) -> None:
        context = ranks_context()
        self.pipes, self.processes = [], []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=_rank, args=(theirs, rank, str(folder)), daemon=True))
            self.processes[-1].start()

    def each(self, name: str | None, deadline_s: float = DEADLINE_S) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(name)
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(deadline_s), f"rank {rank} said nothing"
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("store"))
    yield made
    assert made.each(None) == ["ended"] * SIZE
    for process in made.processes:
        process.join(DEADLINE_S)
        assert process.exitcode == 0


@pytest.mark.system
def test_every_collective_type_and_operation_gives_what_gloo_gives(ranks: Ranks) -> None:
    for answer in ranks.each("same_as_gloo"):
        assert len(answer) == 1, answer


@pytest.mark.system
@pytest.mark.parametrize("part", ["what_gloo_has_not", "close_to_gloo", "functional", "ddp", "fsdp", "dtensor", "subgroups"])
def test_in_processes(ranks: Ranks, part: str) -> None:
    ranks.each(part)


@pytest.mark.gpu
def test_in_processes_with_a_card(ranks: Ranks) -> None:
    ranks.each("on_a_card", 3 * DEADLINE_S)  # Triton compiles kernels
