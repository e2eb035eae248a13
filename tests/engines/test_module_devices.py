"""Where the module engine's memory is, and how much: every allocation on the modules' device, two gradient-sized sets at most.

The `meta` device stands in for an accelerator: a tensor that is made anywhere else is found by a dispatch mode, and a mixture
of devices fails. Events and exchange are stand-ins; the sums of the book, which the host reads, are on the host.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from helixrt.engines.buffers import Buffers
from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.engines.stream_marks import StreamMarks
from helixrt.engines.update import Policy


class Allocations(TorchDispatchMode):
    """Storages that operations have made while this was on: where, how large, and how many bytes lived at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: dict[str, list[tuple[str, int]]] = {}  # device -> operations that made a tensor there, and its bytes
        self.live = self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in given:
                self._made(func, tensor)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        self._made("before", tensor)

    def _made(self, func: Any, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self.devices.setdefault(str(tensor.device), []).append((str(func), size))
        self.live += size
        self.most = max(self.most, self.live)
        self._known[key] = weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.live -= size
        self._known.pop(key, None)


class Marks(StreamMarks):
    """Notes what an accelerator's events would be asked for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def wrote(self, bucket: int, device: torch.device) -> None:
        self.log.append(("wrote", bucket))

    def handed_out(self, bucket: int) -> None:
        self.log.append(("handed out", bucket))

    def wait(self, bucket: int) -> None:
        self.log.append(("wait", bucket))


def on_meta(**options: Any) -> tuple[nn.Module, ModuleEngine, Marks]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    marks = Marks()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    ema = torch.optim.swa_utils.AveragedModel(model)
    registered = Registered.of(model, [optimizer], [scheduler], clip_norm=1.0, extra={"ema": ema})
    return model, ModuleEngine(registered, replicas=2, policy=Policy("sqrt"), bucket_bytes=256, marks=marks, **options), marks


def sums_of(engine: ModuleEngine) -> list[torch.Tensor]:
    """As an exchange on the host would give the book; gradients stay where they are."""
    book, *rest = engine.buckets
    present = torch.ones(book.shape, dtype=book.dtype, device="cpu")
    integers = [torch.ones(t.shape, dtype=t.dtype, device="cpu") for t in rest if t.dtype is torch.int64]
    return [present, *integers, *(torch.empty_like(t) for t in rest if t.dtype is not torch.int64)]


@pytest.mark.parametrize("weight", ["number", "tensor"])
def test_everything_that_is_allocated_follows_the_modules_device(loops: Any, weight: str) -> None:
    with Allocations() as made:
        model, engine, _ = on_meta()
        made.devices.pop("cpu", None)  # the EMA's counter, which torch makes there
        for step in (1, 2):
            engine.begin(lambda bucket: None)
            for last in (False, True):
                x = torch.empty(4, 8, device="meta")
                items = torch.empty((), device="meta") if weight == "tensor" else 4
                engine.backward(model(x).sum(), items, last=last)
            engine.end()
            assert "cpu" not in made.devices, f"made on the host during the work: {made.devices['cpu']}"
            sums = sums_of(engine)
            made.devices.pop("cpu")
            engine.apply(loops.record(step), sums)
            # Optimizers keep their step counters on the host, as torch has it; the book and integer buffers were given there.
            # The first updates also read the state of the host's generator.
            generator = torch.get_rng_state().nbytes
            sizes = [size for _, size in made.devices.pop("cpu") if size != generator]
            assert max(sizes) <= sums[0].untyped_storage().nbytes()
            assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())
        assert set(made.devices) == {"meta"}
    state = engine.state().tensors
    assert {name for name, tensor in state.items() if tensor.device.type != "meta"} == {
        "extra/ema/n_averaged",
        *(f"optimizer/0/state/{name}/step" for name, _ in model.named_parameters()),
    }


def test_a_loaded_state_goes_to_the_modules_device(loops: Any) -> None:
    model, engine, _ = on_meta()
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.empty(4, 8, device="meta")).sum(), last=True)
    engine.end()
    engine.apply(loops.record(1), sums_of(engine))
    state = engine.state()
    other_model, other, _ = on_meta()
    travelled = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in state.tensors.items()}  # on the host
    other.load(type(state)(travelled, state.scalars))
    found = other.state()
    assert {n: t.device for n, t in found.tensors.items()} == {n: t.device for n, t in state.tensors.items()}
    assert all(p.device.type == "meta" for p in other_model.parameters())


def test_events_are_recorded_at_the_hand_out_and_awaited_by_who_reads(loops: Any) -> None:
    model, engine, marks = on_meta()
    handed_out: list[int] = []

    def on_bucket(index: int) -> None:
        handed_out.append(index)
        engine.ready(index)

    engine.begin(on_bucket)
    engine.backward(model(torch.empty(4, 8, device="meta")).sum())
    assert {what for what, _ in marks.log} == {"wrote"}
    marks.log.clear()
    engine.backward(model(torch.empty(4, 8, device="meta")).sum(), last=True)
    engine.end()
    flat = [i for i, b in enumerate(engine.buckets) if b.dtype is torch.float32]
    offset = flat[0]
    for bucket in range(len(flat)):
        events = [what for what, number in marks.log if number == bucket]
        assert events[-2:] == ["handed out", "wait"] and set(events[:-2]) == {"wrote"}, (bucket, events)
    assert handed_out == list(reversed(range(len(engine.buckets)))) and offset == 2
    for book in range(offset):
        assert [what for what, number in marks.log if number == book - offset] == ["wrote", "handed out", "wait"], book


def test_the_book_is_marked_after_its_entries_were_written(loops: Any) -> None:
    """The exchange thread has a stream of its own: what is written after the event may be read before it is there."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    seen: dict[int, list[torch.Tensor]] = {}

    class Snapshots(Marks):
        def wrote(self, bucket: int, device: torch.device) -> None:
            seen[bucket] = [each.clone() for each in engine.buckets]

    registered = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    engine = ModuleEngine(registered, marks=Snapshots())
    for step in (1, 2):
        seen.clear()
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.full((4, 8), float(step))).sum(), 4, last=True)
        engine.end()
        for book, final in enumerate(engine.buckets[:2]):
            assert loops.equal_bits(seen[book - 2][book], final) and final.any()


def test_at_most_two_gradient_sized_sets_live_on_the_device(loops: Any) -> None:
    """The local set, of which `p.grad` is a view, and the sums; in the middle of backward one more parameter's gradient."""
    torch.manual_seed(0)
    with Allocations() as made:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        largest = max(p.numel() * p.element_size() for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        start = made.live
        engine = ModuleEngine(Registered.of(model, [optimizer], clip_norm=1e-3), bucket_bytes=1 << 18)
        sums: list[torch.Tensor] = []
        most: list[int] = []
        for step in range(1, 4):
            made.most = made.live
            engine.begin(lambda bucket: None)
            for last in (False, True):
                engine.backward(model(torch.ones(2, 256)).sum(), last=last)
            engine.end()
            if not sums:
                sums = [torch.empty_like(bucket) for bucket in engine.buckets]  # kept by the exchange from step to step
            for into, bucket in zip(sums, engine.buckets, strict=True):
                into.copy_(bucket)
            engine.apply(loops.record(step), sums)
            most.append(made.most - start)
            assert all(p.grad is not None for p in model.parameters())
    small = 1 << 18  # activations, the book
    assert all(parameters < each <= 2 * parameters + 2 * largest + small for each in most), (most, parameters)
    assert made.live - start <= 2 * parameters + small, "between steps there are two sets, p.grad included"


def test_the_compute_type_is_that_of_forward_alone(loops: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    seen: set[torch.dtype] = set()
    model[0].register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    engine = ModuleEngine(Registered.of(model, [torch.optim.AdamW(model.parameters())]), compute_dtype=torch.bfloat16)
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.randn(3, 4)).float().sum(), last=True)
    engine.end()
    assert not torch.is_autocast_enabled("cpu"), "autocast ends with the batch"
    engine.apply(loops.record(1), loops.summed([engine]))
    assert seen == {torch.bfloat16}
    assert {t.dtype for n, t in engine.state().tensors.items()} == {torch.float32}
    assert [b.dtype for b in engine.buckets][1:] == [torch.float32] * (len(engine.buckets) - 1)
    engine.begin(lambda bucket: None)
    engine.close()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("mode", ["mean", "first"])
def test_means_of_buffers_are_taken_on_the_device_wherever_their_sums_are(mode: Any) -> None:
    """A replica that repeats an update has the sums in host memory, and devices divide by 3 in another way than processors."""
    model = nn.BatchNorm1d(4, device="meta")
    buffers = Buffers(Registered.of(model), mode, 0, 3)
    floats = torch.zeros(buffers.float_room, dtype=torch.float64)
    integers = torch.zeros(buffers.integer_room, dtype=torch.int64)
    with Allocations() as made:
        buffers.commit([1.0] * buffers.marks, floats, integers, [0, 1, 2])
    divisions = {device for device, operations in made.devices.items() for name, _ in operations if "div" in name}
    assert divisions == ({"meta"} if mode == "mean" else set())
