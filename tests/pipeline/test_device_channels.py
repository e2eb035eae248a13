"""Channels of stages on a device: what is sent is read when it is computed, what comes in is used when it is copied.

On the host a device is simulated by streams that a thread works through, each in its order and all in an order that a seed
decides: what is computed or copied is there some time after its call. Memory is filled with NaN before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from helixrt.engines.registered import Registered
from helixrt.engines.staged import StagedModel, StagePlace, Stages
from helixrt.errors import Retryable
from helixrt.pipeline import host_tier
from helixrt.pipeline.channels import Lane as Kinds
from helixrt.pipeline.channels import Tag
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.pipeline.host_tier import HostTier
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.simulate import DELEGATED, Comm, Direct
from helixrt.transport.contract import Endpoint
from helixrt.transport.device_lanes import Lane, Mark
from tests.collectives.test_staging import World, WorldLane
from tests.waiting import until

LIKE = torch.empty(3, 5, dtype=torch.float64)
DEADLINE_S = 60.0


class SimulatedDevice:
    """`queue` is the stage's own stream. Nothing is done while it is `held`."""

    def __init__(self, seed: int) -> None:
        self.world, self.held, self._over = World(seed), threading.Event(), threading.Event()
        self._own = self.world.lane(torch.device("cpu"))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            if self.held.is_set() or not self.world.step():
                time.sleep(1e-4)

    def queue(self, work: Callable[[], object]) -> Mark:
        return self._own.run(work)

    def synchronize(self) -> None:
        until(self.queue(lambda: None).passed, "what the device was given")

    def lane(self, device: torch.device) -> Lane:
        made = self.world.lane(device)
        assert isinstance(made, WorldLane)
        return SimulatedLane(self, made)

    def close(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)


class SimulatedMark(Mark):
    """A wait does not do the work itself."""

    def __init__(self, mark: Mark) -> None:
        self.inner = mark

    def passed(self) -> bool:
        return self.inner.passed()

    def wait(self) -> None:
        until(self.passed, "what the device was given")

    def since_s(self, earlier: Mark) -> float:
        return 0.25


class SimulatedLane(Lane):
    def __init__(self, device: SimulatedDevice, inner: WorldLane) -> None:
        self._device, self._inner = device, inner

    def follow_caller(self, tensor: torch.Tensor) -> None:
        self.follow(self.mark_caller())

    def mark_caller(self) -> Mark:
        return SimulatedMark(self._device.queue(lambda: None))

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, SimulatedMark)
        self._inner.follow(mark.inner)

    def run(self, work: Callable[[], object]) -> Mark:
        return SimulatedMark(self._inner.run(work))

    def lead_caller(self, mark: Mark, made: torch.Tensor | None = None) -> None:
        assert isinstance(mark, SimulatedMark)
        self._device._own.follow(mark.inner)

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._inner.host_like(tensor)

    def hold(self, host: torch.Tensor) -> None:
        self._inner.hold(host)

    def device_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._inner.device_like(tensor)


@contextmanager
def simulated(seed: int) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(seed)
    try:
        yield device
    finally:
        device.held.clear()
        device.close()


def tag(microbatch: int, lane: Kinds = Kinds.F) -> Tag:
    return Tag(0, 1, 0, microbatch, lane)


@pytest.mark.parametrize("comm", [DELEGATED, Direct(2)], ids=["delegated", "direct"])
def test_a_message_has_what_the_device_computes_for_it(endpoint_stages: Any, comm: Comm, seed: int) -> None:
    count = 40

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> FlightRecord:
        record = FlightRecord(f"pp{stage}")
        with simulated(seed + stage) as device:
            channels = StageChannels(endpoints, stage, 2, record, host_bytes=500, comm=comm, make_lane=device.lane)
            channel = channels.channels[1 - stage]
            try:
                if stage == 0:
                    sent = []
                    for m in range(count):
                        tensor = torch.full_like(LIKE, torch.nan)
                        device.queue(lambda tensor=tensor, m=m: tensor.fill_(m))
                        sent.append((channel.send(tag(m), tensor), tensor))
                    for m, (handle, tensor) in enumerate(sent):
                        handle.wait()
                        assert tensor.eq(m).all(), "it is copied, so it was computed"
                        tensor.fill_(torch.nan)  # it is the stage's again
                else:
                    posted = [channel.recv(tag(m), LIKE) for m in range(count)]
                    found: list[torch.Tensor] = []
                    for handle in posted:
                        tensor = handle.wait()
                        device.queue(lambda tensor=tensor: found.append(tensor.clone()))
                    device.synchronize()
                    for m, tensor in enumerate(found):
                        assert tensor.eq(m).all(), m
                assert channels.host.peak_bytes <= 500
            finally:
                channels.close()
        return record

    sender, _ = endpoint_stages.connected(2, talk)
    sends = [event for event in sender.events() if event.kind is Kind.SEND]
    assert len(sends) == count and {event.detail["copy_s"] for event in sends} == {0.25}, "as the device tells it"


def test_a_copy_that_waits_for_the_device_holds_up_no_other_message(endpoint_stages: Any) -> None:
    came, ended = threading.Event(), threading.Event()

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> None:
        with simulated(stage) as device:
            channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"), make_lane=device.lane)
            channel = channels.channels[1 - stage]
            try:
                if stage == 0:
                    device.held.set()
                    handle = channel.send(tag(0), torch.ones_like(LIKE))
                    channel.send(tag(0, Kinds.NORM), torch.full_like(LIKE, 7.0)).wait()  # by the same queue
                    assert came.wait(DEADLINE_S), "the norm was held up"
                    assert not ended.is_set()
                    device.held.clear()
                    handle.wait()
                else:
                    first = channel.recv(tag(0), LIKE)
                    assert channel.recv(tag(0, Kinds.NORM), LIKE).wait().eq(7.0).all()
                    came.set()
                    tensor = first.wait()
                    ended.set()
                    device.synchronize()
                    assert tensor.eq(1.0).all()
            finally:
                channels.close()

    endpoint_stages.connected(2, talk)


def test_a_device_that_fails_ends_the_waits_of_its_stage(endpoint_stages: Any) -> None:
    class Broken(SimulatedLane):
        def run(self, work: Callable[[], object]) -> Mark:
            mark = super().run(work)

            def wait() -> None:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            mark.wait = wait  # type: ignore[method-assign]
            return mark

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> None:
        with simulated(stage) as device:
            options: dict[str, Any] = {}
            if stage == 0:
                options["make_lane"] = lambda where: Broken(device, device.world.lane(where))  # type: ignore[arg-type]
            channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"), **options)
            try:
                if stage == 0:
                    handle = channels.channels[1].send(tag(0), torch.ones_like(LIKE))
                    with pytest.raises(Retryable, match="illegal memory access"):
                        handle.wait()
            finally:
                channels.close()

    endpoint_stages.connected(2, talk)


def test_copies_of_a_tied_parameter_are_compared_by_the_host(endpoint_stages: Any) -> None:
    """What is compared are numbers of the host: a device would have them later."""

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> None:
        record, example, layer = FlightRecord(f"pp{stage}"), torch.zeros(2, 4), nn.Linear(4, 4)
        nn.init.ones_(layer.weight)
        with simulated(stage) as device:
            channels = StageChannels(endpoints, stage, 2, record, make_lane=device.lane)
            stages = Stages({stage: layer}, mse_loss, (example, example), example, microbatches=2, tied="weight")
            group: Any = object()  # which the channels stand in for
            model = StagedModel(stages, StagePlace(stage, 2, group, record, channels=channels))
            engine = model.engine(Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
            try:
                engine.check_copies()
            finally:
                engine.close()

    endpoint_stages.connected(2, talk)


def test_pinned_buffers_count_as_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    released: list[bool] = []

    def pinned(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(host_tier, "pinned", pinned)
    monkeypatch.setattr(host_tier, "release_unused", lambda: released.append(True))
    tier = HostTier(4096, pinned=True)
    first, second = tier.take(1025), tier.take(2048)  # 2048 bytes each
    assert first is not None and second is not None and tier.peak_bytes == 4096
    assert tier.take(1) is None, "the bound holds"
    tier.give(first)
    assert tier.take(1025) is first and made == [1025, 2048], "it is used again"
    tier.give(first)
    tier.give(second)
    assert tier.take(3000) is not None and released == [True], "what was kept has given its memory back"
