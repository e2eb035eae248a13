"""Stages whose channels are real, whatever they stand on; only processes are spared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from helixrt.pipeline.channels import Channel, GroupChannel
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.record import FlightRecord
from helixrt.transport.contract import Endpoint
from helixrt.transport.shared_memory.endpoint import SharedMemoryEndpoint
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions

SECRET = b"of these tests"
CONNECT_S = 60.0

Body = Callable[[int, Callable[[FlightRecord], Mapping[int, Channel]]], Any]


def endpoint_of(transport: str) -> Endpoint:
    """Without heartbeats: tests share few cores, and who ends says so."""
    if transport == "tcp":
        return TcpEndpoint(SECRET, options=TcpOptions(period_s=None))
    return SharedMemoryEndpoint(SECRET, heartbeat_s=None)


@dataclass
class Stages:
    """`run(n, body)` calls body(stage, channels_of) on n threads; channels_of(record) gives the stage's channels. The first
    error is raised here."""

    transport: str
    run_stages: Any  # over Gloo
    queues: int = 2

    def run(self, stages: int, body: Body, gloo_s: float = 60.0, **options: Any) -> list[Any]:
        if self.transport == "gloo":
            return self.run_stages(stages, lambda stage, group: body(stage, lambda r: _gloo(stages, stage, group, r)), gloo_s)
        return self.connected(stages, lambda stage, endpoints: _over(endpoints, stages, stage, body, options))

    def connected(self, stages: int, body: Callable[[int, Sequence[Endpoint]], Any]) -> list[Any]:
        """The same with the connected endpoints of each stage, which `body` closes."""
        endpoints = [[endpoint_of(self.transport) for _ in range(self.queues)] for _ in range(stages)]
        addresses = [[endpoint.address() for endpoint in own] for own in endpoints]
        results: list[Any] = [None] * stages
        errors: list[BaseException] = []
        all_connected = threading.Barrier(stages)  # one that closes at once must not be missed by who still connects

        def work(stage: int) -> None:
            try:
                for number, endpoint in enumerate(endpoints[stage]):
                    peers = {peer: addresses[peer][number] for peer in range(stages) if peer != stage}
                    endpoint.connect(0, stage, peers, CONNECT_S)
                all_connected.wait(CONNECT_S)
                results[stage] = body(stage, endpoints[stage])
            except BaseException as error:  # handed to the test's thread
                errors.append(error)
                all_connected.abort()
            finally:
                for endpoint in endpoints[stage]:
                    endpoint.close()

        threads = [threading.Thread(target=work, args=(s,), name=f"stage-{s}", daemon=True) for s in range(stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a stage did not end in time"
        return results


def _gloo(stages: int, stage: int, group: Any, record: FlightRecord) -> Mapping[int, Channel]:
    return {peer: GroupChannel(group, peer, record) for peer in range(stages) if peer != stage}


def _over(endpoints: Sequence[Endpoint], stages: int, stage: int, body: Body, options: Mapping[str, Any]) -> Any:
    made: list[StageChannels] = []
    options = dict(options)
    if (delay_of := options.pop("delay_of", None)) is not None:
        options["delay"] = delay_of(stage)

    def channels_of(record: FlightRecord) -> Mapping[int, Channel]:
        made.append(StageChannels(endpoints, stage, stages, record, **options))
        return made[0].channels

    try:
        return body(stage, channels_of)
    finally:
        for channels in made:
            channels.close()


@pytest.fixture(params=["gloo", "tcp", "shared_memory"])
def any_stages(request: pytest.FixtureRequest, run_stages: Any) -> Stages:
    return Stages(request.param, run_stages)


@pytest.fixture(params=["tcp", "shared_memory"])
def endpoint_stages(request: pytest.FixtureRequest, run_stages: Any) -> Stages:
    return Stages(request.param, run_stages)
