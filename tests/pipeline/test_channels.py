"""The channel contract: matched by tag whatever the order, no waiting in send, times recorded, loss noticed."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from helixrt.errors import Retryable
from helixrt.pipeline.channels import Lane, Tag, wire_tag
from helixrt.record import FlightRecord, Kind


def tags_of(step: int, chunks: int = 2, microbatches: int = 4) -> list[Tag]:
    return [Tag(1, step, c, m, lane) for c in range(chunks) for m in range(microbatches) for lane in (Lane.F, Lane.B)]


def value_of(tag: Tag) -> torch.Tensor:
    return torch.full((3, 5), float(wire_tag(tag)), dtype=torch.float64)


def test_messages_are_matched_by_tag_whatever_the_order(any_stages: Any, seed: int) -> None:
    def talk(stage: int, channels_of: Any) -> FlightRecord:
        rng = random.Random(seed + stage)
        record = FlightRecord(f"pp{stage}")
        channel = channels_of(record)[1 - stage]
        for step in range(3):
            outgoing, expected = tags_of(step), tags_of(step)
            rng.shuffle(outgoing)
            rng.shuffle(expected)
            half = len(expected) // 2
            posted = {t: channel.recv(t, value_of(t)) for t in expected[:half]}  # some before, some after
            sends = [channel.send(t, value_of(t)) for t in outgoing]
            posted |= {t: channel.recv(t, value_of(t)) for t in expected[half:]}
            rng.shuffle(expected)
            for tag in expected:
                assert torch.equal(posted[tag].wait(), value_of(tag)), f"seed {seed}: {tag}"
            for sent in sends:
                sent.wait()
        channel.close()
        channel.close()
        return record

    for record in any_stages.run(2, talk):
        for kind in (Kind.SEND, Kind.RECV):
            events = [e for e in record.events() if e.kind is kind]
            assert {e.detail["tag"] for e in events} == {str(t) for step in range(3) for t in tags_of(step)}
            assert all(e.detail["bytes"] == 3 * 5 * 8 and e.begin_s <= e.end_s for e in events)


def test_send_does_not_wait_for_the_receiver(any_stages: Any) -> None:
    sent = threading.Event()
    tag, big = Tag(0, 0, 0, 0, Lane.F), torch.arange(1 << 20)

    def talk(stage: int, channels_of: Any) -> None:
        channel = channels_of(FlightRecord("r"))[1 - stage]
        if stage == 0:
            handle = channel.send(tag, big)
            sent.set()  # were send to wait, nobody would get past here
            handle.wait()
        else:
            assert sent.wait(60)
            assert torch.equal(channel.recv(tag, big).wait(), big)
        channel.close()

    any_stages.run(2, talk)


def test_a_lost_peer_is_retryable_and_named(any_stages: Any) -> None:
    connected = threading.Event()

    def talk(stage: int, channels_of: Any) -> str:
        channel = channels_of(FlightRecord("r0.pp0"))[1 - stage]
        if stage == 1:
            connected.wait(60)
            return ""  # its group goes away with it
        connected.set()
        with pytest.raises(Retryable, match="stage 1 of this replica cannot be reached") as caught:
            channel.recv(Tag(0, 0, 0, 0, Lane.F), torch.empty(4)).wait()
        return caught.value.cause.rank

    assert any_stages.run(2, talk, gloo_s=15.0)[0] == "r0.pp0"


def test_wire_tags_are_injective_and_fit() -> None:
    seen: dict[int, Tag] = {}
    for step in (0, 1, 2046, 2047):
        for chunk in (0, 1, 62, 63):
            for microbatch in (0, 1, 2046, 2047):
                for lane in Lane:
                    tag = Tag(5, step, chunk, microbatch, lane)
                    number = wire_tag(tag)
                    assert 0 <= number < 1 << 31 and number not in seen
                    seen[number] = tag
    with pytest.raises(ValueError, match="at most 64 chunks and 2048 micro-batches"):
        wire_tag(Tag(0, 0, 64, 0, Lane.F))
