"""What a verbs rail takes of the completions of its queue pair, without a NIC: chunks are as long as was agreed."""

from __future__ import annotations

import types
from typing import Any

import pytest

from helixrt.protocol.link import frames
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.verbs.flow import Immediate
from helixrt.transport.verbs.connection import VerbsConnection
from helixrt.transport.verbs.library import Enums
from helixrt.transport.verbs.memory import Registrations
from helixrt.transport.verbs.queue_pair import RECEIVE_BIT, Sizes
from helixrt.transport.verbs.wire import HEAD
from tests.transport.test_verbs_memory import FakeDevice
from tests.transport.test_verbs_parts import attributes, fake_enums

GENERATION = 3
SIZES = Sizes()
ENUMS = Enums(fake_enums(False))
WRITTEN = -7  # an opcode that is not that of a SEND


class FakePair:
    """A queue pair whose completions a test gives; slots are full of what an earlier message left there."""

    def __init__(self) -> None:
        self.sizes, self.events = SIZES, None
        self.nic = types.SimpleNamespace(library=types.SimpleNamespace(enums=ENUMS, Error=OSError))
        self.came: list[Any] = []
        self.messages = [memoryview(bytearray(8192)) for _ in range(8)]
        self.slots = [memoryview(bytearray(b"old" * (SIZES.chunk_bytes // 3 + 1)))[: SIZES.chunk_bytes] for _ in range(2)]

    def take_event(self) -> None:
        pass

    def poll(self) -> list[Any]:
        came, self.came = self.came, []
        return came

    def received(self, index: int) -> memoryview:
        return self.messages[index]

    def slot(self, number: int) -> memoryview:
        return self.slots[number]


class Carrier:
    """Takes payloads of any length."""

    def __init__(self) -> None:
        self.landing = memoryview(bytearray(4 * SIZES.chunk_bytes))
        self.whole = 0
        self.failure: tuple[Failure, str] | None = None

    def frame_came(self, connection: Any, frame: Frame) -> None:
        connection.landing = self.landing[: frame.length]

    def payload_came(self, connection: Any, sequence: int) -> None:
        self.whole += 1

    def broke(self, connection: Any, failure: Failure, reason: str) -> None:
        self.failure = failure, reason
        connection.closed = True


def completion(index: int, length: int, opcode: int, immediate: int = 0) -> Any:
    return types.SimpleNamespace(
        status=ENUMS.WC_SUCCESS, wr_id=RECEIVE_BIT | index, byte_len=length, opcode=opcode, imm_data=immediate
    )


def received(length: int, written: list[int]) -> Carrier:
    """A long message of `length` bytes, of which chunks of so many bytes each are written."""
    pair, carrier = FakePair(), Carrier()
    table = Registrations(FakeDevice().register)
    connection = VerbsConnection(
        pair, attributes(), table, carrier, 1, 0, GENERATION, lambda _: None, lambda _: None  # type: ignore[arg-type]
    )
    raw = HEAD.pack(0, 1) + frames.pack(Frame(Kind.DATA, GENERATION, 1, 1, 0, length))
    pair.messages[0][: len(raw)] = raw
    pair.came = [completion(0, len(raw), ENUMS.WC_RECV)]
    for number, count in enumerate(written):
        pair.slots[number][:count] = bytes(count)
        pair.came.append(completion(number + 1, count, WRITTEN, Immediate(GENERATION, number, number + 2).pack()))
    connection.read(1 << 20)
    return carrier


CHUNK = SIZES.chunk_bytes


def test_chunks_that_are_as_long_as_agreed_make_a_message() -> None:
    carrier = received(CHUNK + 100, [CHUNK, 100])
    assert carrier.whole == 1 and carrier.failure is None and not any(carrier.landing[: CHUNK + 100])


@pytest.mark.parametrize(
    ("length", "written"),
    [(CHUNK + 100, [CHUNK - 1]), (CHUNK + 100, [0]), (CHUNK + 100, [CHUNK, 99]), (CHUNK + 100, [CHUNK, 101]),
     (5000, [4999]), (5000, [CHUNK])],
)  # fmt: skip
def test_a_chunk_of_another_length_breaks_the_rail(length: int, written: list[int]) -> None:
    """What was not written is what an earlier message left in the slot: it must not pass for this one."""
    carrier = received(length, written)
    assert not carrier.whole
    assert carrier.failure is not None and carrier.failure[0] is Failure.PROGRAM
    assert f"a chunk of {written[-1]} bytes" in carrier.failure[1]
