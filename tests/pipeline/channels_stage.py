"""`python channels_stage.py STAGE RENDEZVOUS DEVICE MODE TRANSPORT`: one of two stages that send each other tensors, checked.

Their streams are busy: what is sent is computed after the call of `send`, and what comes in is used behind other work. The
stage prints `ok` and the number of messages."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from helixrt.pipeline.channels import Lane, Tag
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.simulate import DELEGATED, Direct
from tests.pipeline.conftest import CONNECT_S, endpoint_of

STEPS, MESSAGES, NUMBERS = 3, 12, 1_000_003
BUSY_CYCLES = 3_000_000  # of the device's clock: some ms
TYPES = (torch.float32, torch.bfloat16, torch.float64)


def busy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def value(step: int, number: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(NUMBERS, generator=generator).to(TYPES[number % len(TYPES)]).to(device)


def main(stage: int, rendezvous: str, device: torch.device, mode: str, transport: str) -> None:
    endpoints = [endpoint_of(transport) for _ in range(2)]
    store = dist.FileStore(rendezvous, 2)
    store.set(str(stage), json.dumps([endpoint.address().hex() for endpoint in endpoints]))
    for endpoint, address in zip(endpoints, json.loads(store.get(str(1 - stage))), strict=True):
        endpoint.connect(0, stage, {1 - stage: bytes.fromhex(address)}, CONNECT_S)
    record = FlightRecord(f"pp{stage}")
    room = 40 << 20  # a few messages: others wait for it
    comm = Direct(2) if mode == "direct" else DELEGATED
    channels = StageChannels(endpoints, stage, 2, record, host_bytes=room, comm=comm, device=device)
    channel = channels.channels[1 - stage]
    failed = torch.zeros((), dtype=torch.int64, device=device)
    try:
        for step in range(STEPS):
            out, into = (Lane.F, Lane.B) if stage == 0 else (Lane.B, Lane.F)
            tags = [Tag(0, step, 0, number, into) for number in range(MESSAGES)]
            posted = [channel.recv(tag, value(step, tag.microbatch, torch.device("cpu"))) for tag in tags]
            for number in range(MESSAGES):
                if stage == 1:  # it sends back what it gets
                    tensor = posted[number].wait()
                    busy(device)
                    failed += tensor.ne(value(step, number, device)).any()
                else:
                    tensor = torch.full((NUMBERS,), torch.nan, dtype=TYPES[number % len(TYPES)], device=device)
                    busy(device)
                    tensor.copy_(value(step, number, device))
                handle = channel.send(Tag(0, step, 0, number, out), tensor)
                if number % 3 == 0:
                    handle.wait()
                    tensor.fill_(torch.nan)  # it is the stage's again
                del tensor
                scratch = torch.full((NUMBERS,), torch.nan, dtype=torch.float64, device=device)  # takes up what is free
                del scratch
            if stage == 0:
                for number in range(MESSAGES):
                    failed += posted[number].wait().ne(value(step, number, device)).any()
            channel.settle()
        assert int(failed) == 0, f"{int(failed)} messages have wrong values"
        assert channels.host.peak_bytes <= room
    finally:
        channels.close()
    sends = [event for event in record.events() if event.kind is Kind.SEND]
    assert all(event.detail["copy_s"] > 0 for event in sends)
    print("ok", len(sends))


if __name__ == "__main__":
    where = torch.device(sys.argv[3], 0) if sys.argv[3] == "cuda" else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
        with torch.cuda.stream(torch.cuda.Stream()):
            main(int(sys.argv[1]), sys.argv[2], where, sys.argv[4], sys.argv[5])
    else:
        main(int(sys.argv[1]), sys.argv[2], where, sys.argv[4], sys.argv[5])
