"""What channels over endpoints do beyond the contract that all channels share: stamps, delays, the host tier, losses."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helixrt.errors import MisuseError, Retryable
from helixrt.pipeline.channels import Lane, Tag
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.pipeline.host_tier import HostTier
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.simulate import DELEGATED, Direct
from helixrt.transport.contract import Endpoint

LIKE = torch.empty(3, 5, dtype=torch.float64)
DELAY_S = 0.2


def tag(microbatch: int, step: int = 1, lane: Lane = Lane.F) -> Tag:
    return Tag(0, step, 0, microbatch, lane)


def value(microbatch: int) -> torch.Tensor:
    return torch.full_like(LIKE, microbatch + 0.25)


def test_arrival_is_stamped_when_it_comes_and_not_when_it_is_wanted(endpoint_stages: Any) -> None:
    def talk(stage: int, endpoints: Sequence[Endpoint]) -> FlightRecord:
        record = FlightRecord(f"pp{stage}")
        channels = StageChannels(endpoints, stage, 2, record)
        channel = channels.channels[1 - stage]
        try:
            if stage == 0:
                record.step = 7
                for m in range(4):
                    channel.send(tag(m), value(m)).wait()
                assert channel.recv(tag(0, lane=Lane.B), LIKE).wait().equal(value(0))
            else:
                posted = [channel.recv(tag(m), LIKE) for m in range(4)]
                for m in (2, 3):  # each behind another of its queue
                    assert posted[m].wait().equal(value(m))
                time.sleep(0.2)  # nobody looks meanwhile
                for m in range(2):
                    assert posted[m].wait().equal(value(m))
                channel.send(tag(0, lane=Lane.B), value(0)).wait()
        finally:
            channels.close()
        return record

    sender, receiver = endpoint_stages.connected(2, talk)
    sends = {e.detail["tag"]: e for e in sender.events() if e.kind is Kind.SEND}
    received = {e.detail["tag"]: e for e in receiver.events() if e.kind is Kind.RECV}
    assert len(received) == 4 and sends.keys() == received.keys()
    for name, event in received.items():
        detail = event.detail
        assert (detail["sent_s"], detail["queued_s"]) == (sends[name].detail["begun_s"], sends[name].begin_s)
        assert detail["queued_s"] <= detail["sent_s"] <= detail["arrived_s"] <= event.end_s
        assert sends[name].step == 7 and sends[name].detail["copy_s"] > 0
    late = [received[str(tag(m))] for m in range(2)]
    assert all(e.end_s >= e.detail["needed_s"] > e.detail["arrived_s"] + 0.1 for e in late)


def test_a_message_that_comes_before_it_is_expected_has_its_own_time(endpoint_stages: Any) -> None:
    """A delay counts from there, too: the receiver is no later because it was busy."""
    wanted = threading.Event()

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
        record = FlightRecord(f"pp{stage}")
        channels = StageChannels(endpoints, stage, 2, record, delay=lambda source, step: 0.05)
        channel = channels.channels[1 - stage]
        try:
            if stage == 0:
                channel.send(tag(0), value(0)).wait()
                channel.send(tag(2), value(2)).wait()  # by the same queue, behind the first
                wanted.wait(60)
                return {}
            assert channel.recv(tag(2), LIKE).wait().equal(value(2))
            time.sleep(0.2)
            posted = channel.recv(tag(0), LIKE)
            assert posted.wait().equal(value(0))
            wanted.set()
            return {"posted_s": record.events()[-1].begin_s, **record.events()[-1].detail}
        finally:
            channels.close()

    late = endpoint_stages.connected(2, talk)[1]
    assert late["sent_s"] + 0.05 <= late["arrived_s"] <= late["posted_s"] - 0.05


@pytest.mark.parametrize("comm", [DELEGATED, Direct(2)], ids=["delegated", "direct"])
def test_a_delayed_link_shows_messages_later_and_blocks_as_the_mode_says(endpoint_stages: Any, comm: Any) -> None:
    """Six messages at once: delegated they are all seen one delay later; direct one after the other, and the third `send` waits
    for the first. The delay is of one direction, and of the steps that it is for."""

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> list[float]:
        record = FlightRecord(f"pp{stage}")
        slow = lambda source, step: DELAY_S if (source, step) == (0, 3) else 0.0  # noqa: E731
        channels = StageChannels(endpoints, stage, 2, record, delay=slow, comm=comm)
        channel = channels.channels[1 - stage]
        record.step = 3
        stamps, begin = [], time.monotonic()
        try:
            if stage == 0:
                for m in range(6):
                    channel.send(tag(m), value(m))
                    stamps.append(time.monotonic() - begin)
                assert channel.recv(tag(0, lane=Lane.B), LIKE).wait().equal(value(9))
                record.step = 4
                channel.send(tag(0, step=2), value(0)).wait()
            else:
                posted = [channel.recv(tag(m), LIKE) for m in range(6)]
                last = channel.recv(tag(0, step=2), LIKE)
                for m in range(6):
                    assert posted[m].wait().equal(value(m))
                channel.send(tag(0, lane=Lane.B), value(9)).wait()
                last.wait()
                events = [e.detail for e in record.events() if e.kind is Kind.RECV]
                stamps = [d["arrived_s"] - d["sent_s"] for d in events] + [events[5]["arrived_s"] - events[0]["arrived_s"]]
        finally:
            channels.close()
        return stamps

    for _ in range(10):  # of what takes no delay one try must show it: on a busy machine anything may take longer
        sends, delays = endpoint_stages.connected(2, talk)
        assert all(delay >= DELAY_S for delay in delays[:6])
        if comm is not DELEGATED:
            assert sends[2] >= 0.9 * DELAY_S and delays[7] >= 5 * DELAY_S
        if delays[6] < DELAY_S and (comm is not DELEGATED or (sends[-1] < DELAY_S and delays[7] < DELAY_S)):
            return
    pytest.fail(f"sent after {sends} s, arrived after {delays} s")


def test_the_host_tier_is_bounded_and_what_finds_no_room_is_sent_later(endpoint_stages: Any) -> None:
    """Ten long messages through room for two: none is lost, no more room is taken, and no send waits for it."""
    big = torch.empty(1 << 18)
    room = 2 * (big.nbytes + 64)
    expect = threading.Event()

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> HostTier:
        channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"), host_bytes=room)
        channel = channels.channels[1 - stage]
        try:
            if stage == 0:
                sends = [channel.send(tag(m), torch.full_like(big, m)) for m in range(10)]
                expect.set()
                for send in sends:
                    send.wait()
            else:
                assert expect.wait(60)  # were a send to wait for room, nobody would get past here
                posted = [channel.recv(tag(m), big) for m in range(10)]
                for m in reversed(range(10)):
                    assert posted[m].wait().equal(torch.full_like(big, m))
        finally:
            channels.close()
        return channels.host

    host = endpoint_stages.connected(2, talk)[0]
    assert 0 < host.peak_bytes <= room and host.waits > 0


def test_a_tensor_is_the_stages_again_when_it_is_copied(endpoint_stages: Any) -> None:
    """Also when the receiver has not asked for it yet, and it is too long to travel ahead."""
    big = torch.arange(1 << 19)
    overwritten = threading.Event()

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> None:
        channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"))
        channel = channels.channels[1 - stage]
        try:
            if stage == 0:
                mine = big.clone()
                channel.send(tag(0), mine).wait()
                mine.zero_()
                overwritten.set()
            else:
                assert overwritten.wait(60)
                assert channel.recv(tag(0), big).wait().equal(big)
        finally:
            channels.close()

    endpoint_stages.connected(2, talk)


def test_a_size_that_was_not_agreed_is_the_peers_error(endpoint_stages: Any) -> None:
    def talk(stage: int, endpoints: Sequence[Endpoint]) -> str:
        channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"))
        channel = channels.channels[1 - stage]
        try:
            if stage == 0:
                channel.send(tag(0), value(0))
            with pytest.raises(Retryable, match=f"stage {1 - stage} of this replica cannot be reached") as caught:
                channel.recv(tag(0), torch.empty(100)).wait()
            return str(caught.value)
        finally:
            channels.close()

    said = endpoint_stages.connected(2, talk)
    assert "bytes" in said[1], said


def test_who_sends_nothing_is_waited_for_no_longer_than_the_limit(endpoint_stages: Any) -> None:
    over = threading.Event()

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> None:
        channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"), timeout_s=0.2)
        try:
            if stage == 0:
                assert over.wait(60)
                return
            with pytest.raises(Retryable, match="stage 0 of this replica sent or took nothing in 0.2 s"):
                channels.channels[0].recv(tag(0), LIKE).wait()
            over.set()
        finally:
            channels.close()

    endpoint_stages.connected(2, talk)


def test_with_direct_communication_a_lost_stage_is_named_whoevers_message_is_waited_for(endpoint_stages: Any) -> None:
    """A send that stage 2 will not take stands before the receive from stage 1, whose message is there."""
    lost, over = threading.Event(), threading.Event()

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> None:
        channels = StageChannels(endpoints, stage, 3, FlightRecord(f"pp{stage}"), timeout_s=300.0, comm=Direct())
        try:
            if stage == 2:
                assert lost.wait(60)
                return  # which closes its channels
            if stage == 1:
                channels.channels[0].send(tag(0), LIKE)
                assert over.wait(60)
                return
            received = channels.channels[1].recv(tag(0), LIKE)
            channels.channels[2].send(tag(0), torch.zeros(1 << 20))
            lost.set()
            with pytest.raises(Retryable, match="stage 2 of this replica cannot be reached"):
                received.wait()
        finally:
            over.set() if stage == 0 else None
            channels.close()

    endpoint_stages.connected(3, talk)


def test_tensors_elsewhere_are_refused(endpoint_stages: Any) -> None:
    def talk(stage: int, endpoints: Sequence[Endpoint]) -> None:
        channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"))
        try:
            with pytest.raises(MisuseError, match="carry tensors on cpu, not on meta"):
                channels.channels[1 - stage].send(tag(0), torch.empty(3, device="meta"))
        finally:
            channels.close()

    endpoint_stages.connected(2, talk)


def test_a_stage_that_closes_waits_for_the_arrival_of_what_it_has_sent(endpoint_stages: Any) -> None:
    """The word of an arrival would find its end closed, and the other stage, in the middle of its work, take it for lost."""

    def body(stage: int, endpoints: Sequence[Endpoint]) -> dict[int, Any]:
        channels = StageChannels(endpoints, stage, 2, FlightRecord(f"pp{stage}"), comm=Direct(1))
        if stage == 0:
            channels.channels[1].send(Tag(1, 1, 1, 0, Lane.F), torch.ones(8)).wait()
            channels.close()
            return {}
        time.sleep(0.3)
        assert channels.channels[0].recv(Tag(1, 1, 1, 0, Lane.F), torch.empty(8)).wait().sum() == 8
        time.sleep(0.3)
        lost = dict(channels._lost)
        channels.close()
        return lost

    _, lost = endpoint_stages.connected(2, body)
    assert all("cannot reach it" not in str(cause) for cause in lost.values()), lost


def test_a_stage_that_closes_behind_another_sends_what_it_has_begun(endpoint_stages: Any) -> None:
    """Stage 0 has ended its part and closed: to stage 1 it is lost, which then closes at once with messages for stage 2."""
    many = 40

    def talk(stage: int, endpoints: Sequence[Endpoint]) -> bool:
        channels = StageChannels(endpoints, stage, 3, FlightRecord(f"pp{stage}"))
        try:
            if stage == 1:
                with pytest.raises(Retryable, match="stage 0 of this replica cannot be reached"):
                    channels.channels[0].recv(tag(0), LIKE).wait()
                for m in range(many):
                    channels.channels[2].send(tag(m), value(m))
            elif stage == 2:
                posted = [channels.channels[1].recv(tag(m), LIKE) for m in range(many)]
                return all(handle.wait().equal(value(m)) for m, handle in enumerate(posted))
        finally:
            channels.close()
        return True

    assert all(endpoint_stages.connected(3, talk))
