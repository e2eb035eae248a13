"""A rail over a queue pair: frames and payloads to work requests and back, without blocking.

In: frames to write, a connected queue pair, its completions. Out: calls of its `Carrier`, as a TCP rail's connection
makes them (`tcp_connection`): a frame came, a payload is whole, the rail broke. A long payload is written from the
caller's memory, registered in place, into slots of the other end's ring, a chunk at a time (`verbs_wire`); there it is
copied once, to where the machine says, when its completion has come. So what is sent again after a failure never touches
memory that anybody reads: a half-written slot is no message.

Credits: this end never has more messages on their way than the other end has receives posted, nor more chunks than it has
free slots, so a slow receiver stops its sender here, not in the NIC.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from helixrt.protocol import frames
from helixrt.protocol.frames import HEADER_BYTES, Frame, FrameError, Kind
from helixrt.protocol.link_messages import Failure
from helixrt.transport.rail_connection import Carrier
from helixrt.transport.verbs_failure import first_cause
from helixrt.transport.verbs_memory import Range, Registrations
from helixrt.transport.verbs_one_sided import WORD_BYTES, Action, OneSided
from helixrt.transport.verbs_queue_pair import CHAIN, NUMBER_MASK, RECEIVE_BIT, QueuePair, Request
from helixrt.transport.verbs_wire import (
    HEAD,
    HEAD_BYTES,
    RECEIVE_BYTES,
    SHORT_BYTES,
    Attributes,
    Immediate,
    check_immediate,
    forward,
)

_SPARE = 3 * CHAIN  # receives that data leaves alone: those used and not posted again yet, and credits
_LET_GO_S = 0.05  # so long a rail may take to finish with memory that its caller wants back; then it is reset


class _Out:
    """A frame to write: its bytes, and what is left of a long payload."""

    __slots__ = ("address", "at", "begun", "header", "name", "payload", "range", "sequence")

    def __init__(self, header: bytes, payload: memoryview | None, name: tuple[int, int] | None, sequence: int) -> None:
        self.header, self.payload, self.name, self.sequence = header, payload, name, sequence
        self.begun = False  # the frame is posted
        self.at = 0  # of a long payload: bytes posted
        self.range: Range | None = None  # that covers the payload, which begins at `address`
        self.address = 0


class _Lent:
    """Memory that a work request reads until it is completed."""

    __slots__ = ("bounced", "name", "number", "range", "sequence")

    def __init__(self, number: int, name: tuple[int, int] | None, range: Range | None, bounced: bool) -> None:
        self.number, self.name, self.range, self.bounced = number, name, range, bounced
        self.sequence = 0  # of the DATA frame that this completes


class VerbsConnection:
    """`wake(self)` is called when it can go on writing. `retire(pair)` gets the queue pair back, disarmed."""

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
    ) -> None:
        self.peer, self.number = peer, number
        self.sock = pair.events  # what to wait for
        self.landing: memoryview | None = None
        self.length = 0
        self.closed = self.blocked = False
        self._pair, self._theirs, self._registrations, self._carrier = pair, theirs, registrations, carrier
        self._generation, self._wake, self._retire = generation, wake, retire
        self._sizes, self._enums = pair.sizes, pair.nic.library.enums
        self._broken: tuple[Failure, str] | None = None  # and the carrier does not know yet
        # Sending.
        self._queue: deque[_Out] = deque()
        self._batch: list[Request] = []
        self._posted = self._completed = 0  # work requests
        self._said = self._used = 0  # messages sent, and those of them the other end has used
        self._signalled = 0  # the newest work request that will be completed by itself
        self._slots_in_use: deque[int] = deque()  # the messages that filled them
        self._next_slot = 0
        self._lent: deque[_Lent] = deque()
        self._bounced = self._bounces_free = self._bounces_signalled = 0
        # Receiving.
        self._arrived: deque[Any] = deque()  # completions of receives that were polled and not looked at
        self._heard = self._told = 0  # messages used, and how many of them the other end knows of
        self._chunks_heard = self._chunks_told = 0
        self._missing = self._at = self._sequence = 0  # of the payload under way
        # Reads and atomic operations.
        self._asked: deque[OneSided] = deque()
        self._asking: deque[tuple[int, OneSided, Range | None]] = deque()  # with their work requests

    # ---------------------------------------------------------------- writing

    def put(
        self, header: bytes, payload: memoryview | None = None, name: tuple[int, int] | None = None, sequence: int = 0
    ) -> None:
        """Queue a frame; `name` and `sequence` of DATA."""
        self._queue.append(_Out(header, payload, name, sequence))

    @property
    def idle(self) -> bool:
        """Nothing waits to be written."""
        return not self._queue

    @property
    def watches_writing(self) -> bool:
        """Its descriptor tells of completions alone, so there is nothing to change in what is watched."""
        return bool(self._queue)

    @watches_writing.setter
    def watches_writing(self, value: bool) -> None:
        raise AssertionError("it follows from what waits to be written")

    def write(self, budget: int) -> None:
        """As much as credits allow."""
        if self.closed or self._tell_if_broken() or self._broken is not None:
            return
        try:
            while self._asked and self._ask_next():
                if len(self._batch) == CHAIN:
                    self._post()
            while self._queue and self._next():
                if len(self._batch) == CHAIN:
                    self._post()
            self._post()
        except (self._pair.nic.library.Error, OSError) as error:
            self._batch.clear()
            self._broke(Failure.DEVICE, f"posting failed: {error}")
            return
        self.blocked = bool(self._queue or self._asked)

    def _next(self) -> bool:
        """Add the next work request to the batch; False if none may go now."""
        if self._posted - self._completed >= self._sizes.sends - CHAIN:
            return False
        if self._said - self._used >= self._theirs.receives - _SPARE:
            return False
        out = self._queue[0]
        if not out.begun:
            self._send(out.header, out.payload if out.payload is not None and len(out.payload) <= SHORT_BYTES else None)
            out.begun = True
            if out.payload is None or len(out.payload) <= SHORT_BYTES:
                self._finish(out)
            return True
        return self._write_chunk(out)

    def _finish(self, out: _Out) -> None:
        """Its memory is the caller's again: it was copied."""
        self._queue.popleft()
        if out.sequence:
            self._carrier.frame_left(self, out.sequence)

    def _send(self, header: bytes, payload: memoryview | None, signalled: bool = False) -> None:
        """A message in memory of our own."""
        memory, address = self._pair.sending(self._posted)
        self._said += 1
        self._told, self._chunks_told = self._heard, self._chunks_heard
        HEAD.pack_into(memory, 0, self._told & 0xFFFFFFFF, self._said & 0xFFFFFFFF)
        end = HEAD_BYTES + len(header)
        memory[HEAD_BYTES:end] = header
        if payload is not None:
            memory[end : end + len(payload)] = payload
            end += len(payload)
        self._add(self._enums.WR_SEND, address, end, self._pair.key, signalled=signalled)

    def _write_chunk(self, out: _Out) -> bool:
        assert out.payload is not None
        theirs, sizes = self._theirs, self._sizes
        if len(self._slots_in_use) >= theirs.slots:
            return False
        length = min(theirs.chunk_bytes, len(out.payload) - out.at)
        if len(out.payload) <= sizes.bounce_bytes and out.range is None:
            if self._bounced - self._bounces_free >= sizes.bounces:
                return False
            memory, address = self._pair.bounce(self._bounced)
            memory[:length] = out.payload[out.at : out.at + length]
            key, lent = self._pair.key, _Lent(self._posted, None, None, True)
            self._bounced += 1
        else:
            if out.range is None:
                out.range, out.address = self._registrations.take(out.payload)
            address, key = out.address + out.at, out.range.key
            lent = _Lent(self._posted, out.name, None, False)
        self._said += 1
        out.at += length
        last = out.at == len(out.payload)
        if last and lent.bounced:
            self._finish(out)
        elif last:
            lent.range, lent.sequence = out.range, out.sequence
            self._queue.popleft()
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % theirs.slots
        self._slots_in_use.append(self._said)
        self._lent.append(lent)
        self._add(
            self._enums.WR_RDMA_WRITE_WITH_IMM,
            address,
            length,
            key,
            signalled=last and not lent.bounced,  # its memory is waited for
            immediate=Immediate(self._generation, slot, self._said).pack(),
            remote_address=theirs.ring_address + slot * theirs.chunk_bytes,
            remote_key=theirs.ring_key,
        )
        return True

    def _add(
        self,
        opcode: int,
        address: int,
        length: int,
        key: int,
        *,
        signalled: bool = False,
        immediate: int = 0,
        remote_address: int = 0,
        remote_key: int | None = None,
        atomic: tuple[int, int] | None = None,
    ) -> None:
        # Every Nth, and the first after a pause: so one that will be completed by itself is always under way.
        many = self._posted + 1 - self._signalled >= self._sizes.signal_every or self._signalled <= self._completed
        if signalled or many or self._bounced - self._bounces_signalled >= max(1, self._sizes.bounces // 4):
            signalled, self._signalled, self._bounces_signalled = True, self._posted + 1, self._bounced
        flags = self._enums.SEND_SIGNALED if signalled else 0
        number = self._posted
        request = Request(number, opcode, flags, address, length, key, immediate, remote_address, remote_key, atomic)
        self._batch.append(request)
        self._posted += 1

    def _post(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._pair.post(batch)

    # ---------------------------------------------------------------- reads and atomic operations

    def ask(self, operation: OneSided) -> None:
        """It is done when the completion of its work request has come."""
        self._asked.append(operation)
        self.blocked = False
        self._wake(self)

    def _ask_next(self) -> bool:
        if self._posted - self._completed >= self._sizes.sends - CHAIN:
            return False
        operation, e = self._asked[0], self._enums
        memory: Range | None = None
        _, address = self._pair.sending(self._posted)
        length, key = WORD_BYTES, self._pair.key
        if operation.into is not None:
            memory, address = self._registrations.take(operation.into)
            length, key = len(operation.into), memory.key
        self._asked.popleft()
        self._asking.append((self._posted, operation, memory))
        opcodes = {
            Action.READ: e.WR_RDMA_READ,
            Action.FETCH_ADD: e.WR_ATOMIC_FETCH_AND_ADD,
            Action.COMPARE_SWAP: e.WR_ATOMIC_CMP_AND_SWP,
        }
        window = operation.window
        self._add(
            opcodes[operation.action],
            address,
            length,
            key,
            signalled=True,
            remote_address=window.address + operation.offset,
            remote_key=window.keys[self.number],
            atomic=None if operation.action is Action.READ else (operation.operand, operation.swap),
        )
        return True

    def _answered(self) -> None:
        while self._asking and self._asking[0][0] < self._completed:
            number, operation, memory = self._asking.popleft()
            if memory is not None:
                self._registrations.release(memory)
            place, _ = self._pair.sending(number)
            operation.finish(0 if operation.action is Action.READ else int.from_bytes(place[:WORD_BYTES], "little"))

    def unanswered(self) -> tuple[list[OneSided], list[OneSided]]:
        """Posted and not done, and not even posted; they are the caller's again."""
        posted, waiting = [operation for _, operation, _ in self._asking], list(self._asked)
        self._asked.clear()
        return posted, waiting

    # ---------------------------------------------------------------- credits and completions

    def _give_credit(self) -> None:
        """Tell the other end what was used, when it has no other way to know soon."""
        owed, chunks = self._heard - self._told, self._chunks_heard - self._chunks_told
        if owed * 4 >= self._sizes.receives - _SPARE or chunks * 2 >= self._sizes.slots:
            self._send_head()

    def _send_head(self, signalled: bool = False) -> None:
        if self._posted - self._completed < self._sizes.sends:
            self._send(b"", None, signalled)
            self._post()

    def _flush(self) -> None:
        """See to it that all that was posted will be known to be completed."""
        if self._signalled < self._posted:
            self._send_head(signalled=True)

    def detach(self, name: tuple[int, int]) -> None:
        """The caller takes this message's memory back: what is still to be written comes from a copy, and what is with
        the NIC gets a moment to leave; else the rail is reset."""
        for out in self._queue:
            if out.name == name and out.payload is not None:
                out.payload = memoryview(bytes(out.payload))
                if out.range is not None:
                    self._lent.append(_Lent(self._posted - 1, name, out.range, False))
                    out.range = None
        newest = max((lent.number for lent in self._lent if lent.name == name), default=-1)
        if newest < self._completed or self.closed:
            return
        until = time.monotonic() + _LET_GO_S
        try:
            self._flush()
            while newest >= self._completed and self._broken is None and time.monotonic() < until:
                self._poll()
            if newest >= self._completed:
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
        before = self._heard
        try:
            self._pair.take_event()
            self._poll()
            while self._arrived and not self.closed:
                self._use(self._arrived.popleft())
                if not self._arrived and not self.closed:
                    self._poll()
            if not self.closed and self._broken is None:
                self._give_credit()
        except FrameError as error:
            self._broke(Failure.PROGRAM, str(error))
        except (self._pair.nic.library.Error, OSError) as error:
            self._broke(Failure.DEVICE, f"the queue pair does not work: {error}")
        if not self.closed and not self._tell_if_broken() and (self._queue or self._asked):
            self.blocked = False
            self._wake(self)
        return self._heard > before

    def _poll(self) -> None:
        """Take all completions there are: those of work requests count at once, receives wait for their turn."""
        failed = []
        while not self.closed and (found := self._pair.poll()):
            for completion in found:
                if self.closed:
                    return
                if completion.status != self._enums.WC_SUCCESS:
                    failed.append(int(completion.status))
                elif completion.wr_id & RECEIVE_BIT:
                    self._arrived.append(completion)
                else:
                    self._complete(completion.wr_id & NUMBER_MASK)
        if failed and self._broken is None:
            self._broken = first_cause(failed, self._enums)

    def _complete(self, low: int) -> None:
        self._completed += ((low - self._completed) & NUMBER_MASK) + 1
        if self._asking:
            self._answered()
        while self._lent and self._lent[0].number < self._completed:
            lent = self._lent.popleft()
            self._bounces_free += lent.bounced
            if lent.range is not None:
                self._registrations.release(lent.range)
            if lent.sequence:
                self._carrier.frame_left(self, lent.sequence)

    def _use(self, completion: Any) -> None:
        """A message of the other end."""
        index = completion.wr_id & NUMBER_MASK
        self._heard += 1
        if completion.opcode == self._enums.WC_RECV:
            message = self._pair.received(index)[: completion.byte_len]
            if len(message) < HEAD_BYTES or len(message) > RECEIVE_BYTES:
                raise FrameError(f"a message of {len(message)} bytes: must be {HEAD_BYTES} to {RECEIVE_BYTES}")
            used, number = HEAD.unpack_from(message)
            if number != self._heard & 0xFFFFFFFF:
                raise FrameError(f"message {number}: {self._heard & 0xFFFFFFFF} must come now")
            self._credited(used)
            if len(message) > HEAD_BYTES:
                self._take_frame(message[HEAD_BYTES:])
        else:
            slot = self._chunks_heard % self._sizes.slots
            check_immediate(int(completion.imm_data), Immediate(self._generation, slot, self._heard))
            self._chunks_heard += 1
            self._take_chunk(self._pair.slot(slot)[: min(self._missing, self._sizes.chunk_bytes)])
        if not self.closed and index % CHAIN == CHAIN - 1:
            self._pair.post_receives(index + 1 - CHAIN)

    def _credited(self, used: int) -> None:
        self._used = forward(self._used, used)
        if self._used > self._said:
            raise FrameError(f"{self._used} messages were used: {self._said} were sent")
        slots = self._slots_in_use
        while slots and slots[0] <= self._used:
            slots.popleft()

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
        if self.landing is not None:
            self.landing[:] = rest
        self._whole()

    def _announce(self, frame: Frame) -> None:
        self._sequence, self.length, self._at, self.landing = frame.sequence, frame.length, 0, None
        self._carrier.frame_came(self, frame)

    def _take_chunk(self, chunk: memoryview) -> None:
        if not self._missing:
            raise FrameError("a chunk came, and no payload is under way")
        end = self._at + len(chunk)
        if self.landing is not None:
            self.landing[self._at : end] = chunk
        self._at, self._missing = end, self._missing - len(chunk)
        if not self._missing:
            self._whole()

    def _whole(self) -> None:
        self.landing = None
        self._carrier.payload_came(self, self._sequence)

    # ---------------------------------------------------------------- the end

    def fail(self, failure: Failure, reason: str) -> None:
        """Something outside of it says that the rail does not work."""
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

    def emptied(self) -> bool:
        """Everything was written, and the other end's NIC has it."""
        if self.closed or self._broken is not None:
            return True
        if not self.idle:
            return False
        try:
            self._flush()
        except (self._pair.nic.library.Error, OSError):
            return True  # nothing more goes this way
        return self._completed == self._posted

    def close(self) -> None:
        """Nothing comes and nothing goes any more when this returns."""
        if self.closed:
            return
        self.closed = True
        self.landing = None
        self._retire(self._pair)
        ranges = [lent.range for lent in self._lent] + [out.range for out in self._queue]
        for memory in (*ranges, *(memory for _, _, memory in self._asking)):
            if memory is not None:
                self._registrations.release(memory)
        self._asking.clear()
        self._queue.clear()
        self._lent.clear()
        self._arrived.clear()
