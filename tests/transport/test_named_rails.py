"""Rails by the names that users give them, and what an endpoint of named rails says and records."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from helixrt.collectives.endpoints import Reach, find_rails, open_endpoint
from helixrt.errors import ConfigError
from helixrt.protocol.hopping.messages import HoppingOptions, Unloaded
from helixrt.record import FlightRecord, Kind
from helixrt.transport.named_rails import NamedRails, named_rails
from helixrt.transport.tcp.rails import TcpRail
from helixrt.transport.verbs.devices import VerbsRail
from tests.transport.conformance import MIB
from tests.transport.worlds import Message, World


@pytest.fixture
def ports(tmp_path: Path) -> Path:
    """What the kernel shows of two RDMA devices, one of them with two ports."""
    for device, number in (("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2)):
        port = tmp_path / device / "ports" / str(number)
        gid = (("gids/0", "fe80::1"), ("gid_attrs/types/0", "RoCE v2"), ("gid_attrs/ndevs/0", "eth1"))
        for file, text in (*gid, ("state", "4")):
            (port / file).parent.mkdir(parents=True, exist_ok=True)
            (port / file).write_text(text + "\n")
    return tmp_path


def test_names_of_both_kinds_keep_their_order(ports: Path) -> None:
    found = named_rails(["mlx5_1/2", "lo", "mlx5_0", "127.0.0.3"], ports)
    assert found == NamedRails(
        (TcpRail("127.0.0.1", "lo"), TcpRail("127.0.0.3")),
        (VerbsRail(device="mlx5_1", port=2), VerbsRail(device="mlx5_0", port=1)),
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["mlx5_0/2"], "^rail=mlx5_0/2: must be an RDMA port of this host, which has mlx5_0/1, mlx5_1/1, mlx5_1/2"),
        (["mlx5_0/x"], "^rail=mlx5_0/x: must be an RDMA device, or DEVICE/PORT"),
        (["mlx5_7"], "^rail=mlx5_7: must be an IP address or an interface"),
        ([""], "^rail=: must be an IP address or an interface"),
        (["lo", "mlx5_0", "lo"], "^rail=lo: is named twice"),
    ],
)
def test_a_name_that_is_none_is_told_in_one_line(names: list[str], message: str, ports: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        named_rails(names, ports)
    assert "\n" not in str(caught.value)


def test_paths_of_a_port_have_flow_labels_of_their_own() -> None:
    one = NamedRails((TcpRail(),), (VerbsRail(device="a"), VerbsRail(device="b")))
    assert one.as_paths(1) == one
    paths = one.as_paths(3)
    assert paths.tcp == (TcpRail(),) * 3
    assert sorted((rail.device, rail.flow_label) for rail in paths.rdma) == [(d, n) for d in "ab" for n in (1, 2, 3)]
    assert {rail.device for rail in paths.rdma[:2]} == {"a", "b"}, "the default rail, then another NIC"


def test_the_transport_and_its_rails_must_agree() -> None:
    with pytest.raises(ConfigError, match="^rail=lo: is no RDMA port, and verbs needs one"):
        find_rails(Reach(transport="verbs", rails=("lo",)))
    with pytest.raises(ConfigError, match="^paths=3: needs hopping"):
        Reach(paths=3)


def test_what_was_chosen_and_why_is_in_the_flight_record() -> None:
    records = {}

    def make(secret: bytes, heartbeat_s: float | None) -> object:
        record = records[len(records)] = FlightRecord(f"r{len(records)}")
        hopping = HoppingOptions(unloaded=Unloaded(1e8))
        reach = Reach(transport="tcp", rails=("127.0.0.1",), paths=3, hopping=hopping, heartbeat_s=heartbeat_s)
        return open_endpoint(secret, "127.0.0.1", reach, record)

    world = World(make, 2)  # type: ignore[arg-type]
    try:
        world.connect()
        world.exchange([Message(a, 1 - a, 0, i, MIB) for a in (0, 1) for i in range(4)], random.Random(1))
    finally:
        world.close()
    for rank, record in records.items():
        (reached,) = [event.detail for event in record.events() if event.kind is Kind.REACHED]
        assert reached == {"peers": [1 - rank], "transport": "tcp", "why": "the only transport of both"}
    assert any(e.kind is Kind.PATH_PROBED for record in records.values() for e in record.events()), "it looks at its paths"
