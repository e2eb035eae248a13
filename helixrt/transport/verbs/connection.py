"""A rail over a queue pair: frames and payloads to work requests and back, without blocking.

In: frames to write, a connected queue pair, its completions. Out: calls of its `Carrier`, as a TCP rail's connection
makes them (`tcp.connection`): a frame came, a payload is whole, the rail broke. A long payload is written from the
caller's memory, registered in place, into slots of the other end's ring, a chunk at a time (`wire`); there it is
copied once, to where the machine says, when its completion has come. So what is sent again after a failure never touches
memory that is being read: a half-written slot is no message. `send_queue` handles sends.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from helixrt.protocol.link import frames
from helixrt.protocol.link.frames import HEADER_BYTES, Frame, FrameError, Kind
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.liveness import Acknowledgements
from helixrt.protocol.verbs.flow import receives_to_post
from helixrt.transport.intake import Intake
from helixrt.transport.rail_connection import Carrier
from helixrt.transport.verbs.failure import first_cause
from helixrt.transport.verbs.memory import Registrations
from helixrt.transport.verbs.one_sided import OneSided
from helixrt.transport.verbs.queue_pair import NUMBER_MASK, RECEIVE_BIT, QueuePair
from helixrt.transport.verbs.send_queue import SendQueue
from helixrt.transport.verbs.wire import (
    HEAD,
    HEAD_BYTES,
    RECEIVE_BYTES,
    SHORT_BYTES,
    Attributes,
)

_LET_GO_S = 0.05  # limit for a rail to release memory that its caller asks back; then it is reset


class VerbsConnection:
    """`wake(self)` is called when it can go on writing. `retire(pair)` gets the queue pair back: it must disarm it before the
    caller of the endpoint has any memory of its messages again."""

    def __init__(
        self,
        pair: QueuePair,
        theirs: Attributes,
        registrations: Registrations,
        carrier: Carrier,
        peer: int,
        number: int,
        generation: int,
        wake: Callable[[VerbsConnection], None],
        retire: Callable[[QueuePair], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer, self.number = peer, number
        self.sock = pair.events  # what to wait for
        self.landing: memoryview | Intake | None = None
        self.length = 0
        self.closed = self.blocked = False
        self._pair, self._carrier = pair, carrier
        self._wake, self._retire, self._clock = wake, retire, clock
        self._sizes, self._enums = pair.sizes, pair.nic.library.enums
        self._broken: tuple[Failure, str] | None = None  # and the carrier does not know yet
        self._sends = SendQueue(pair, theirs, registrations, number, generation, self._left)
        self._arrived: deque[Any] = deque()  # completions of receives that were polled and not looked at
        self._missing = self._at = self._sequence = 0  # of the payload under way
        self._answered_s = -math.inf  # when the other end's NIC last acknowledged something, by a completion

    # ---------------------------------------------------------------- writing

    def put(
        self, header: bytes, payload: memoryview | None = None, name: tuple[int, int] | None = None, sequence: int = 0
    ) -> None:
        """Queue a frame; `name` and `sequence` of DATA."""
        self._sends.put(header, payload, name, sequence)

    @property
    def idle(self) -> bool:
        """Nothing waits to be written."""
        return self._sends.idle

    @property
    def watches_writing(self) -> bool:
        """Its descriptor reports completions only, so the watched events never change."""
        return not self._sends.idle

    @watches_writing.setter
    def watches_writing(self, value: bool) -> None:
        raise AssertionError("it follows from what waits to be written")

    def write(self, budget: int) -> None:
        """As much as credits allow."""
        if self.closed or self._tell_if_broken() or self._broken is not None:
            return
        try:
            self._sends.write()
        except (self._pair.nic.library.Error, OSError) as error:
            self._broke(Failure.DEVICE, f"posting failed: {error}")
            return
        self.blocked = self._sends.waits

    def ask(self, operation: OneSided) -> None:
        """It is done when the completion of its work request has come."""
        self._sends.ask(operation)
        self.blocked = False
        self._wake(self)

    def unanswered(self) -> tuple[list[OneSided], list[OneSided]]:
        """Posted and not done, and not even posted; they are the caller's again."""
        return self._sends.unanswered()

    def _left(self, sequence: int) -> None:
        self._carrier.frame_left(self, sequence)

    def detach(self, name: tuple[int, int]) -> None:
        """The caller takes this message's memory back: what is still to be written comes from a copy, and what is with
        the NIC gets a moment to leave; else the rail is reset."""
        newest = self._sends.detach(name)
        if newest < self._sends.flow.completed or self.closed:
            return
        until = self._clock() + _LET_GO_S
        try:
            self._sends.flush()
            while newest >= self._sends.flow.completed and self._broken is None and self._clock() < until:
                self._poll()
            if newest >= self._sends.flow.completed:
                self._pair.disarm()
                self._broken = self._broken or (Failure.PATH, "reset: it still held memory that its owner wanted back")
        except (self._pair.nic.library.Error, OSError) as error:
            self._broken = Failure.DEVICE, f"the queue pair does not work: {error}"
        if self._broken is not None:
            self.blocked = False
            self._wake(self)

    def say_last(self, word: bytes) -> None:
        """The reason of an end goes over the control connection."""

    # ---------------------------------------------------------------- reading

    def read(self, budget: int) -> bool:
        """Whatever has come; whether anything had. To be called when the descriptor is readable."""
        if self.closed or self._tell_if_broken():
            return False
        before = self._sends.flow.heard
        try:
            self._pair.take_event()
            self._poll()
            while self._arrived and not self.closed:
                self._use(self._arrived.popleft())
                if not self._arrived and not self.closed:
                    self._poll()
            if not self.closed and self._broken is None:
                self._sends.give_credit()
        except FrameError as error:
            self._broke(Failure.PROGRAM, str(error))
        except (self._pair.nic.library.Error, OSError) as error:
            self._broke(Failure.DEVICE, f"the queue pair does not work: {error}")
        if not self.closed and not self._tell_if_broken() and self._sends.waits:
            self.blocked = False
            self._wake(self)
        return self._sends.flow.heard > before

    def _poll(self) -> None:
        """Take all completions there are: those of work requests count at once, receives wait for their turn. Once it is clear
        why the queue pair failed, the rest is only what failed with it."""
        flushed: int | None = None
        while not self.closed and self._broken is None and (found := self._pair.poll()):
            for completion in found:
                if self.closed:
                    return
                if completion.status != self._enums.WC_SUCCESS:
                    cause = first_cause((int(completion.status),), self._enums)
                    if cause[0] is not Failure.CASCADE:
                        self._broken = cause
                        return
                    flushed = int(completion.status)
                elif completion.wr_id & RECEIVE_BIT:
                    self._arrived.append(completion)
                else:
                    self._answered_s = self._clock()
                    self._sends.complete(completion.wr_id & NUMBER_MASK)
        if flushed is not None:
            self._broken = first_cause((flushed,), self._enums)

    def _use(self, completion: Any) -> None:
        """A message of the other end."""
        index = completion.wr_id & NUMBER_MASK
        flow = self._sends.flow
        if completion.opcode == self._enums.WC_RECV:
            message = self._pair.received(index)[: completion.byte_len]
            if len(message) < HEAD_BYTES or len(message) > RECEIVE_BYTES:
                raise FrameError(f"a message of {len(message)} bytes: must be {HEAD_BYTES} to {RECEIVE_BYTES}")
            flow.took_head(*HEAD.unpack_from(message))
            if len(message) > HEAD_BYTES:
                self._take_frame(message[HEAD_BYTES:])
        else:
            slot = flow.took_chunk(int(completion.imm_data))
            self._take_chunk(self._pair.slot(slot), int(completion.byte_len))
        first = receives_to_post(index)
        if not self.closed and first is not None:
            self._pair.post_receives(first)

    def _take_frame(self, raw: memoryview) -> None:
        if self._missing:
            raise FrameError(f"a frame came while {self._missing} bytes of a payload were missing")
        if len(raw) < HEADER_BYTES:
            raise FrameError(f"a frame of {len(raw)} bytes: a header has {HEADER_BYTES}")
        frame = frames.parse(raw[:HEADER_BYTES])
        rest = raw[HEADER_BYTES:]
        short = frame.kind is not Kind.DATA or frame.length <= SHORT_BYTES
        if len(rest) != (frame.length if short else 0):
            raise FrameError(f"{frame.kind.name} of {frame.length} bytes came with {len(rest)}")
        if frame.kind is not Kind.DATA:
            self._carrier.frame_came(self, frames.with_body(frame, rest))
            return
        self._announce(frame)
        if self.closed:
            return
        if not short:
            self._missing = frame.length
            return
        self._land(0, rest)
        self._whole()

    def _announce(self, frame: Frame) -> None:
        self._sequence, self.length, self._at, self.landing = frame.sequence, frame.length, 0, None
        self._carrier.frame_came(self, frame)

    def _take_chunk(self, slot: memoryview, written: int) -> None:
        if not self._missing:
            raise FrameError("a chunk came, and no payload is under way")
        if written != (expected := min(self._missing, self._sizes.chunk_bytes)):
            raise FrameError(f"a chunk of {written} bytes was written: {expected} must come now")
        chunk = slot[:written]
        end = self._at + len(chunk)
        self._land(self._at, chunk)
        self._at, self._missing = end, self._missing - len(chunk)
        if not self._missing:
            self._whole()

    def _land(self, at: int, part: memoryview) -> None:
        if isinstance(self.landing, Intake):
            self.landing.put(part)
        elif self.landing is not None:
            self.landing[at : at + len(part)] = part

    def _whole(self) -> None:
        self.landing = None
        self._carrier.payload_came(self, self._sequence)

    # ---------------------------------------------------------------- the end

    def fail(self, failure: Failure, reason: str) -> None:
        """Another part has reported that the rail does not work."""
        if not self.closed:
            self._broke(failure, reason)

    def _broke(self, failure: Failure, reason: str) -> None:
        self._broken = None
        self._carrier.broke(self, failure, reason)

    def _tell_if_broken(self) -> bool:
        """What came before the failure is used first: it was received."""
        if self._broken is None or self._arrived:
            return False
        self._broke(*self._broken)
        return True

    def acknowledgements(self, now: float) -> Acknowledgements | None:
        """The other end's NIC needs nothing of the process there. Without credit nothing is sent that it could acknowledge."""
        return None if self.closed else Acknowledgements(self._answered_s, self._sends.starved)

    def emptied(self) -> bool:
        """Everything was written, and the other end's NIC has it."""
        if self.closed or self._broken is not None:
            return True
        if not self.idle:
            return False
        try:
            self._sends.flush()
        except (self._pair.nic.library.Error, OSError):
            return True  # nothing more goes this way
        return self._sends.flow.completed == self._sends.flow.posted

    def close(self) -> None:
        """Nothing that comes counts any more when this returns; `retire` sees to it that nothing goes."""
        if self.closed:
            return
        self.closed = True
        self.landing = None
        self._retire(self._pair)
        self._sends.release()
        self._arrived.clear()
