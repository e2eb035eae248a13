"""`helixrt.compile` and the backend of torch.compile on a GPU: eager's losses, gradients, random numbers and memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import helixrt
from helixrt.compile.dynamo import backend
from helixrt.compile.fake_model import capture_whole
from helixrt.compile.materialize import materialize
from helixrt.compile.options import Options
from helixrt.compile.train_step import TrainStep
from helixrt.parallel.group import Group
from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.example_values import Pool
from helixrt.passes.measure import Stopwatch
from helixrt.passes.parts import Part
from helixrt.passes.profile import profile
from helixrt.passes.ranks import Ranks
from helixrt.passes.replay import state_of
from helixrt.passes.split import split, whole_backward
from helixrt.passes.unit_costs import balanced
from helixrt.passes.units import units
from helixrt.pipeline.measured_units import expected, measure_units
from helixrt.schedule.generators.classic import one_f_one_b

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MICROBATCHES, SEED = 4, 7
EXACT = 1e-4  # of the largest element: float32 without TF32, sums in another order
HALF = 3e-2  # of it under bfloat16, whose epsilon is 8e-3


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No TF32; profiles are not those of other runs."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setenv("HELIXRT_CACHE", str(tmp_path / "cache"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch.set_float32_matmul_precision(before)


class Block(nn.Module):
    """Causal attention and a network, both with dropout; with `again` computed again in the backward."""

    def __init__(self, wide: int, dropout: float, again: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(2))
        self.qkv, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)
        self.p, self.again = dropout, again

    def body(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, wide = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, wide // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), dropout_p=self.p, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), self.p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)


class Decoder(nn.Module):
    def __init__(self, wide: int = 256, layers: int = 2, vocab: int = 512, dropout: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, wide), nn.Linear(wide, vocab, bias=False)
        self.layers = nn.ModuleList(Block(wide, dropout, again) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), target.flatten())


def data(rows: int = 8, length: int = 128, vocab: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (2, rows, length)
    tokens, target = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return tokens, target


def plain_loop(model: nn.Module, *batch: torch.Tensor, count: int = MICROBATCHES, **options: Any) -> torch.Tensor:
    losses = []
    for given in zip(*(each.chunk(count) for each in batch), strict=True):
        loss = model(*given, **options)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        with torch.autocast(DEVICE, enabled=False):
            (loss / count).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def check_near(model: nn.Module, other: nn.Module, tolerance: float) -> None:
    """Gradients of the two differ by at most this share of the largest element."""
    found, wanted = gradients(model), gradients(other)
    assert found.keys() == wanted.keys() and found
    for name, gradient in wanted.items():
        apart = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert apart <= tolerance, f"{name}: {float(apart):.2e}"


def seeded(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(SEED)
    return run()


def random_state() -> torch.Tensor:
    return state_of(torch.device(DEVICE))


# ------------------------------------------------------------------------------------------------ against eager


@pytest.mark.parametrize("strands", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(None, EXACT), (torch.bfloat16, HALF)], ids=["float32", "autocast"])
def test_a_step_is_that_of_a_plain_loop(strands: int, dtype: torch.dtype | None, tolerance: float) -> None:
    """With dropout in attention and outside of it, in regions that are computed again: the same numbers are drawn."""
    eager = Decoder(dropout=0.1, again=True).to(DEVICE)
    model = helixrt.compile(copy.deepcopy(eager), microbatches=MICROBATCHES, strands=strands)
    batch = data()
    with torch.autocast(DEVICE, dtype=dtype, enabled=dtype is not None):
        wanted = seeded(lambda: plain_loop(eager, *batch))
        drawn = random_state()
        found = seeded(lambda: model.train_step(*batch))
        assert torch.equal(random_state(), drawn), "as many numbers are drawn"
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0.0)
    check_near(model, eager, tolerance)
    assert model.explain().state == ("woven" if strands == 2 else "single strand")


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, EXACT), (torch.bfloat16, HALF)], ids=["float32", "autocast"])
def test_gpt2_trains_as_in_eager(dtype: torch.dtype | None, tolerance: float) -> None:
    """Without dropout in attention: eager leaves the mask out, and so may take another kernel, which draws otherwise."""
    transformers = pytest.importorskip("transformers")
    small = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 512, "attn_pdrop": 0.0}
    eager = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, bos_token_id=0, eos_token_id=0)).to(DEVICE).train()
    model = helixrt.compile(copy.deepcopy(eager), microbatches=MICROBATCHES)
    tokens, _ = data()
    with torch.autocast(DEVICE, dtype=dtype, enabled=dtype is not None):
        wanted = seeded(lambda: loop_of_gpt2(eager, tokens))
        found = seeded(lambda: model.train_step(input_ids=tokens, labels=tokens, use_cache=False))
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0.0)
    check_near(model, eager, tolerance)


def loop_of_gpt2(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    class Called(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    return plain_loop(Called(), tokens)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_two_strands_train_bit_for_bit_as_one(again: bool) -> None:
    """With dropout. Kernels of fused attention sum in any order, so that attention is that of plain operators here."""
    model = Decoder(dropout=0.2, again=again).to(DEVICE)
    steps = [helixrt.compile(copy.deepcopy(model), microbatches=MICROBATCHES, strands=strands) for strands in (1, 2)]
    with sdpa_kernel(SDPBackend.MATH), torch.autocast(DEVICE, dtype=torch.bfloat16):
        losses, states = [], []
        for step in steps:
            losses.append(seeded(lambda step=step: step.train_step(*data())))
            states.append(random_state())
    assert torch.equal(*losses) and torch.equal(*states)
    one, two = (gradients(step) for step in steps)
    assert one.keys() == two.keys() and all(torch.equal(gradient, two[name]) for name, gradient in one.items())
    assert [step.explain().state for step in steps] == ["single strand", "woven"]


def test_batch_norms_statistics_are_eagers() -> None:
    """A GPU's kernel writes into them, whatever its schema says."""
    eager = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    model = helixrt.compile(copy.deepcopy(eager), loss=F.mse_loss, microbatches=MICROBATCHES)
    x, y = torch.randn(256, 32, device=DEVICE), torch.randn(256, 8, device=DEVICE)
    for _ in range(2):
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (F.mse_loss(eager(a), b) / MICROBATCHES).backward()
        model.train_step(x, target=y)
    check_near(model, eager, EXACT)
    for (name, found), wanted in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")


def test_compiled_operators_train_as_eager() -> None:
    eager = Decoder(layers=1, dropout=0.1).to(DEVICE)
    model = helixrt.compile(copy.deepcopy(eager), microbatches=MICROBATCHES, codegen="inductor")
    wanted = seeded(lambda: plain_loop(eager, *data()))
    found = seeded(lambda: model.train_step(*data()))
    torch.testing.assert_close(found, wanted, rtol=EXACT, atol=0.0)
    check_near(model, eager, EXACT)
    plan = model.explain(times=True).plan
    fused = [one for one in (*plan.forward, *plan.backward) if "fused" in one.signature]
    assert fused and all(one.time_us > 0 for one in fused)


# ------------------------------------------------------------------------------------------------ memory


def peak(run: Callable[[], Any], model: nn.Module) -> int:
    """Bytes that tensors need at most, gradients included, beside what there is before."""
    run()  # workspaces and kernels
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


def test_a_strand_needs_the_memory_of_checkpointed_eager() -> None:
    """Within 5%. The peak of two strands is the reported one, the gradients, and workspaces of kernels: 32 MiB for a matrix
    product, and parts of attention's backward."""
    eager, batch = Decoder(512, 8, dropout=0.1, again=True).to(DEVICE), data(8, 4096)
    everything = copy.deepcopy(eager)
    for layer in everything.layers:
        layer.again = False
    peaks = {}
    for strands in (1, 2):
        step = helixrt.compile(copy.deepcopy(eager), microbatches=2, strands=strands)
        peaks[strands] = peak(lambda step=step: step.train_step(*batch), step)
    explanation, gradients_bytes = step.explain(), sum(gradient.nbytes for gradient in gradients(step).values())
    del step
    peaks["eager"] = peak(lambda: plain_loop(eager, *batch, count=2), eager)
    peaks["everything"] = peak(lambda: plain_loop(everything, *batch, count=2), everything)
    assert peaks[1] <= 1.05 * peaks["eager"], peaks
    assert peaks["everything"] > 1.5 * peaks["eager"], peaks
    said = explanation.woven_peak_bytes + gradients_bytes
    assert 0.9 * said <= peaks[2] <= 1.1 * said + (32 << 20), (peaks, said)


# ------------------------------------------------------------------------------------------------ torch.compile


def test_a_model_of_torch_compile_trains_as_eager() -> None:
    eager = Decoder(again=True).to(DEVICE)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend=backend)
    losses: dict[str, list[float]] = {}
    for name, each, call in (("eager", eager, eager), ("helixrt", model, compiled)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.3)
        for _ in range(4):
            optimizer.zero_grad()
            losses.setdefault(name, []).append(float(plain_loop(call, *data())))
            optimizer.step()
    assert losses["helixrt"] == pytest.approx(losses["eager"], rel=EXACT) and losses["eager"][-1] < losses["eager"][0]
    check_near(model, eager, 10 * EXACT)


def test_what_torch_compile_computes_again_draws_the_same_numbers() -> None:
    """The states of generators pass through the graphs. The gradient of a sum of dropped-out ones is the mask."""
    compiled = torch.compile(lambda x: checkpoint(lambda h: F.dropout(h, 0.5) * 1.0, x, use_reentrant=False), backend=backend)
    x = torch.ones(4096, device=DEVICE, requires_grad=True)
    masks = []
    for _ in range(2):
        found = compiled(x)
        x.grad = None
        found.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, found.detach()) and 0.3 < float((found > 0).float().mean()) < 0.7
        masks.append(found.detach())
    assert not torch.equal(*masks)


# ------------------------------------------------------------------------------------------------ times and plans


def test_measured_operators_add_up_to_a_run() -> None:
    """Within 25% of the graph, run and waited for as a whole: so large that the GPU is what takes time."""
    model = Decoder(2048, 2, 8192).to(DEVICE, torch.bfloat16)
    step = TrainStep(model, Options(microbatches=2))
    step(*data(8, 2048, 8192))
    explanation = step.explain(times=True)
    model.zero_grad()
    assert step.latest is not None and step.latest.strands is not None and explanation.plan is not None
    graph = step.latest.strands.forward
    values = Pool().values(graph.part)
    watch = Stopwatch(torch.device(DEVICE, 0), Ranks())
    taken = [watch.work_us(lambda: graph(values.__getitem__, NoGradients())) for _ in range(8)]
    assert sum(one.time_us for one in explanation.plan.forward) == pytest.approx(sorted(taken[2:])[1], rel=0.25)
    assert explanation.measured_ms == {}, "a processor's clock does not time a GPU"


class NoGradients:
    def give(self, name: str, gradient: torch.Tensor) -> None:
        raise AssertionError(f"a forward gives a gradient of {name}")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """This process as the one rank of an NCCL group: collectives are launched on a stream of their own, and waited for."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device(DEVICE, 0))
    group = dist.group.WORLD
    assert group is not None
    yield Group(group.group_name, 0, 1)
    dist.destroy_process_group()


class Summed(nn.Module):
    """A layer whose output all ranks sum, and whose backward does so, too."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.up, self.down = group, nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.down(F.gelu(self.up(SumBackward.apply(x, self.group.name))))
            x = SumForward.apply(x, self.group.name)
        return x


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x, "sum", name))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(gradient.contiguous(), "sum", ctx.name)), None


def test_collectives_of_nccl_are_measured_paired_and_waited_for(alone: Group) -> None:
    eager = Summed(alone).to(DEVICE)
    model = helixrt.compile(copy.deepcopy(eager), loss=F.mse_loss, microbatches=MICROBATCHES)
    x, y = torch.randn(2, 4096, 256, device=DEVICE)
    for _ in range(2):
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (F.mse_loss(eager(a), b) / MICROBATCHES).backward()
        model.train_step(x, target=y)
    check_near(model, eager, EXACT)
    plan = model.explain().plan
    assert plan is not None and plan.profile is not None and plan.pairing is not None
    talk = {name: time for name, time in plan.profile.times.items() if " over " in name}
    assert talk and all(time.measured and time.time_us > 0 and time.host_us == 0 for time in talk.values())
    assert plan.profile.pairs, "compute is measured beside them"


def on_meta(layers: int) -> nn.Module:
    with torch.device("meta"):
        return Decoder(1024, layers)


def test_a_model_is_captured_and_cut_without_memory_and_its_units_are_measured(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    joint: Part = capture_whole(on_meta(6), data(8, 1024), device=DEVICE)
    assert torch.cuda.memory_allocated() - before <= 1 << 20, "no parameter has memory"
    schedule = one_f_one_b(2, 4)
    estimate = expected(joint, schedule)
    assert all(time.total_ms > 0 for time in list(estimate.times.values())[1:-1])
    found = measure_units(joint, estimate, cache=tmp_path)
    assert found.times is not None, found.reason
    layers = [time.total_ms for time in list(found.times.values())[1:-1]]
    assert min(layers) > 0
    cut = balanced(joint, schedule, measured=found.times)
    assert len(cut.starts) == 1 and 1 < cut.starts[0] < units(joint).count
    assert {node.meta["val"].device.type for node in joint.graph.find_nodes(op="placeholder")} == {DEVICE}


def test_materializing_leaves_the_generators_as_they_were() -> None:
    before, model = random_state(), on_meta(1)
    made = materialize(model, [name for name, _ in model.named_parameters()], device=DEVICE, seed=3)
    assert torch.equal(random_state(), before) and all(one.device.type == DEVICE for one in made.parameters.values())


def test_profiling_leaves_the_generators_as_they_were(tmp_path: Path) -> None:
    halves = split(capture(Decoder(dropout=0.1, again=True).to(DEVICE), data(2)))
    assert any(map(nodes.is_random, halves.forward.graph.nodes))
    before = random_state()
    measured = profile([halves.forward, whole_backward(halves)], cache=tmp_path)
    assert torch.equal(random_state(), before)
    taken = {name: time for name, time in measured.times.items() if "attention" in name or "dropout" in name}
    assert len(taken) >= 4 and all(time.measured and time.time_us > 0 for time in taken.values()), taken
