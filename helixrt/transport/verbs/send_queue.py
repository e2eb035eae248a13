"""The sending half of a verbs rail: frames, payloads, reads and atomic operations become work requests.

In: frames to write, and what to ask of the other end's memory; which work requests are completed, and how much the other
end has used. Out: work requests posted in chains, every Nth of them signalled; memory given back when its work request is
completed.

What may go now, and under which number, is decided by `protocol/verbs/flow.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from helixrt.protocol.verbs.flow import CHAIN, Flow
from helixrt.transport.verbs.memory import Range, Registrations
from helixrt.transport.verbs.one_sided import WORD_BYTES, Action, OneSided
from helixrt.transport.verbs.queue_pair import QueuePair, Request
from helixrt.transport.verbs.wire import HEAD, HEAD_BYTES, SHORT_BYTES, Attributes


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


class SendQueue:
    """Raises what posting raises. `left(sequence)` is called when the memory of that DATA frame is the caller's again."""

    def __init__(
        self,
        pair: QueuePair,
        theirs: Attributes,
        registrations: Registrations,
        rail: int,
        generation: int,
        left: Callable[[int], None],
    ) -> None:
        self._pair, self._theirs, self._registrations = pair, theirs, registrations
        self._rail, self._left = rail, left
        self._sizes, self._enums = pair.sizes, pair.nic.library.enums
        self.flow = Flow(pair.sizes.bounds, generation, theirs.receives, theirs.slots)
        self._queue: deque[_Out] = deque()
        self._batch: list[Request] = []
        self._lent: deque[_Lent] = deque()
        self._asked: deque[OneSided] = deque()
        self._asking: deque[tuple[int, OneSided, Range | None]] = deque()  # with their work requests

    # ---------------------------------------------------------------- frames

    def put(self, header: bytes, payload: memoryview | None, name: tuple[int, int] | None, sequence: int) -> None:
        """Queue a frame; `name` and `sequence` of DATA."""
        self._queue.append(_Out(header, payload, name, sequence))

    @property
    def idle(self) -> bool:
        """No frame waits to be written."""
        return not self._queue

    @property
    def waits(self) -> bool:
        """Something could go if there were credit, or room."""
        return bool(self._queue or self._asked)

    @property
    def starved(self) -> bool:
        """Frames wait for credit, and the other end's NIC has answered all that it was to answer."""
        return bool(self._queue) and self.flow.starved

    def write(self) -> None:
        """As much as credits allow."""
        try:
            while self._asked and self._ask_next():
                if len(self._batch) == CHAIN:
                    self._post()
            while self._queue and self._next():
                if len(self._batch) == CHAIN:
                    self._post()
            self._post()
        except BaseException:
            self._batch.clear()
            raise

    def _next(self) -> bool:
        """Add the next work request to the batch; False if none may go now."""
        if not self.flow.may_send:
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
            self._left(out.sequence)

    def _send(self, header: bytes, payload: memoryview | None, signalled: bool = False) -> None:
        """A message in memory of our own."""
        memory, address = self._pair.sending(self.flow.posted)
        HEAD.pack_into(memory, 0, *self.flow.speak())
        end = HEAD_BYTES + len(header)
        memory[HEAD_BYTES:end] = header
        if payload is not None:
            memory[end : end + len(payload)] = payload
            end += len(payload)
        self._add(self._enums.WR_SEND, address, end, self._pair.key, signalled=signalled)

    def _write_chunk(self, out: _Out) -> bool:
        assert out.payload is not None
        theirs, sizes, flow = self._theirs, self._sizes, self.flow
        if not flow.slot_is_free:
            return False
        length = min(theirs.chunk_bytes, len(out.payload) - out.at)
        if len(out.payload) <= sizes.bounce_bytes and out.range is None:
            if not flow.bounce_is_free:
                return False
            memory, address = self._pair.bounce(flow.bounce())
            memory[:length] = out.payload[out.at : out.at + length]
            key, lent = self._pair.key, _Lent(flow.posted, None, None, True)
        else:
            if out.range is None:
                out.range, out.address = self._registrations.take(out.payload)
            address, key = out.address + out.at, out.range.key
            lent = _Lent(flow.posted, out.name, None, False)
        out.at += length
        last = out.at == len(out.payload)
        if last and lent.bounced:
            self._finish(out)
        elif last:
            lent.range, lent.sequence = out.range, out.sequence
            self._queue.popleft()
        slot, immediate = flow.write()
        self._lent.append(lent)
        self._add(
            self._enums.WR_RDMA_WRITE_WITH_IMM,
            address,
            length,
            key,
            signalled=last and not lent.bounced,  # its memory is waited for
            immediate=immediate,
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
        number, signalled = self.flow.post(signalled)
        flags = self._enums.SEND_SIGNALED if signalled else 0
        request = Request(number, opcode, flags, address, length, key, immediate, remote_address, remote_key, atomic)
        self._batch.append(request)

    def _post(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._pair.post(batch)

    # ---------------------------------------------------------------- reads and atomic operations

    def ask(self, operation: OneSided) -> None:
        """It is done when the completion of its work request has come."""
        self._asked.append(operation)

    def _ask_next(self) -> bool:
        if not self.flow.may_post:
            return False
        operation, e = self._asked[0], self._enums
        memory: Range | None = None
        _, address = self._pair.sending(self.flow.posted)
        length, key = WORD_BYTES, self._pair.key
        if operation.into is not None:
            memory, address = self._registrations.take(operation.into)
            length, key = len(operation.into), memory.key
        self._asked.popleft()
        self._asking.append((self.flow.posted, operation, memory))
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
            remote_key=window.keys[self._rail],
            atomic=None if operation.action is Action.READ else (operation.operand, operation.swap),
        )
        return True

    def _answered(self) -> None:
        while self._asking and self._asking[0][0] < self.flow.completed:
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

    def give_credit(self) -> None:
        """Tell the other end what was used, when it has no other way to know soon."""
        if self.flow.owes_credit:
            self._send_head()

    def _send_head(self, signalled: bool = False) -> None:
        if self.flow.may_post_credit:
            self._send(b"", None, signalled)
            self._post()

    def flush(self) -> None:
        """See to it that all that was posted will be known to be completed."""
        if self.flow.signalled < self.flow.posted:
            self._send_head(signalled=True)

    def complete(self, low: int) -> None:
        flow = self.flow
        flow.complete(low)
        if self._asking:
            self._answered()
        while self._lent and self._lent[0].number < flow.completed:
            lent = self._lent.popleft()
            flow.bounces_free += lent.bounced
            if lent.range is not None:
                self._registrations.release(lent.range)
            if lent.sequence:
                self._left(lent.sequence)

    # ---------------------------------------------------------------- memory

    def detach(self, name: tuple[int, int]) -> int:
        """The caller takes this message's memory back: what is still to be posted comes from a copy. The newest work request
        that reads the memory itself; -1: none does."""
        for out in self._queue:
            if out.name == name and out.payload is not None:
                out.payload = memoryview(bytes(out.payload))
                if out.range is not None:
                    self._lent.append(_Lent(self.flow.posted - 1, name, out.range, False))
                    out.range = None
        return max((lent.number for lent in self._lent if lent.name == name), default=-1)

    def release(self) -> None:
        """No work request reads any memory from now on."""
        ranges = [lent.range for lent in self._lent] + [out.range for out in self._queue]
        for memory in (*ranges, *(memory for _, _, memory in self._asking)):
            if memory is not None:
                self._registrations.release(memory)
        self._asking.clear()
        self._queue.clear()
        self._lent.clear()
