"""One rank's end of a link through shared memory, in one generation: its turns, its waking, its end.

In: a connected Unix socket, the two segments, and whether the peer's memory may be read. Out: the peer's
messages in the memory given to `receive`, and `Outcome`s. `messages` says how messages travel.

Waking: words in the segments say what there is. The socket carries no data, only a doorbell for an end that said it
sleeps (`arm`), so two busy ends make no system call for it. Its hang-up is the peer's death; a pidfd tells
that even when a child process has inherited the socket.
"""

from __future__ import annotations

import math
import os
import select
import socket
from collections.abc import Callable

from helixrt.errors import Cause
from helixrt.protocol.calls import Agreement, awaited
from helixrt.protocol.liveness import Stopped
from helixrt.protocol.shared_memory.frames import Kind, SegmentError
from helixrt.protocol.shared_memory.messages import LIMITS, Limits
from helixrt.transport.contract import Buffer, Lost, Outcome, PeerAborted, Sink
from helixrt.transport.intake import Intake, Stage
from helixrt.transport.shared_memory.handshake import Joined
from helixrt.transport.shared_memory.messages import Receiving, Sending
from helixrt.transport.shared_memory.segment import (
    Fence,
    NoMemory,
    RingReader,
    RingWriter,
    State,
    Word,
)
from helixrt.transport.stopped_processes import is_stopped

TURN_BYTES = 8 << 20  # moved in one `progress`, then the caller's other work has its turn

_ASLEEP, _WANTS_ROOM, _SLEEP = 1, 2, 4  # the word ASLEEP: two flags, and the number of the sleep above them


class Watch:
    """An endpoint's epoll, and which link a descriptor in it belongs to."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._owners: dict[int, tuple[SharedMemoryLink, bool]] = {}

    def add(self, descriptor: int, link: SharedMemoryLink, process: bool) -> None:
        """`process`: it shows the end of the peer's process, and not what happens on the connection."""
        self.epoll.register(descriptor, select.EPOLLIN)
        self._owners[descriptor] = link, process

    def remove(self, descriptor: int) -> None:
        """To be called before the descriptor is closed: closing is not enough where a child process inherited it."""
        self.epoll.unregister(descriptor)
        del self._owners[descriptor]

    def owner(self, descriptor: int) -> tuple[SharedMemoryLink, bool] | None:
        return self._owners.get(descriptor)


class SharedMemoryLink:
    """Takes over `connection` and what is `joined`, and has `watch` watch its descriptors.

    `outcome` gets the results; `stage` is the endpoint's. After its end (`ended`) it ignores input and reports nothing.
    """

    def __init__(
        self,
        peer: int,
        connection: socket.socket,
        joined: Joined,
        watch: Watch,
        period_s: float | None,
        outcome: Callable[[Outcome], None],
        stage: Stage,
        limits: Limits = LIMITS,
        begun: dict[int, int] | None = None,
    ) -> None:
        """`begun`: operations of this rank, to be shared by its links of this generation (`protocol.calls.Agreement`)."""
        self.peer, self.ended = peer, False
        self._stage = stage
        self.direct = joined.memory is not None  # the peer's long messages are read out of its memory
        self._connection, self._process, self._watch = connection, joined.process, watch
        watch.add(connection.fileno(), self, False)
        if joined.process >= 0:
            watch.add(joined.process, self, True)
        own, theirs, self._outcome = joined.own, joined.theirs, outcome
        self._own, self._theirs = own, theirs
        self._fence = Fence()
        self._writer, self._reader = RingWriter(own, theirs, self._fence), RingReader(own, theirs, self._fence)
        self._pid, self._stopped = joined.pid, None if period_s is None or not joined.pid else Stopped(period_s)
        self._forgotten: set[int] = set()
        agreement = self._agreement = Agreement(begun)
        self._out = Sending(peer, own, theirs, self._writer, outcome, self._forgotten, agreement, limits)
        self._in = Receiving(
            peer, own, theirs, joined.memory, self._fence, outcome, self._out.put, self._forgotten, agreement, limits
        )
        self._sleeps, self._armed, self._rung = 0, 0, -1
        self._gone = False  # the peer hung up; what it wrote before is still there to be read
        self._again = False  # `progress` stopped in the middle of work, or there is new work
        self._look_due_s = 0.0 if self._stopped is not None else math.inf  # at the state of the peer's process

    # ---------------------------------------------------------------- the caller's side

    def send(self, op: int, index: int, data: Buffer) -> None:
        if self.ended or op in self._forgotten:
            return
        if self._gone and self._theirs.load(Word.STATE) == State.CLOSED:
            return self._lose(f"rank {self.peer} has closed its end, message {op, index} cannot reach it")
        try:
            self._out.send(op, index, data)
            self._publish()
        except (SegmentError, NoMemory) as error:
            self._refuse(error)

    def receive(self, op: int, index: int, into: Buffer | Sink) -> None:
        if self.ended or op in self._forgotten:
            return
        try:
            self._in.receive(op, index, into if isinstance(into, memoryview) else Intake(into, self._stage))
            self._again = self._again or self._gone or self._in.busy
            self._publish()
        except (SegmentError, NoMemory) as error:
            self._refuse(error)

    def forget(self, op: int) -> None:
        if self.ended:
            return
        self._forgotten.add(op)
        self._out.forget(op)
        self._in.forget(op)
        self._fence()  # no reader that comes after us takes the caller's next bytes for the message

    def abort(self, cause: Cause) -> None:
        """Tell the peer, without waiting for it, and end."""
        if not self.ended:
            self._own.put_cause(cause)
            self._leave(State.ABORTED)

    def lose(self, what: str) -> None:
        """Give the link up because of `what`."""
        if not self.ended and not self._gone:
            self._lose(what)

    def close(self) -> None:
        """Inform the peer of the end; short messages that were sent still arrive. Idempotent."""
        if not self.ended:
            self._leave(State.CLOSED)

    @property
    def left(self) -> bool:
        """Whether the peer has left the generation in order; else, when it hangs up, it has ended or given this link up."""
        return self._theirs.load(Word.STATE) in (State.CLOSED, State.ABORTED)

    # ---------------------------------------------------------------- turns

    def quiet(self, now: float) -> bool:
        """There is nothing to do before a descriptor shows something. Costs little: most links are, at most times."""
        return self.ended or not (self._again or now >= self._look_due_s or self._reader.stirs() or self._out.blocked)

    def progress(self, now: float, connection_ready: bool, process_ended: bool) -> None:
        """Do what can be done now. `connection_ready`, `process_ended`: what the descriptors show."""
        if self.ended:
            return
        if self._armed:
            self._armed = 0
            self._own.store(Word.ASLEEP, self._sleeps * _SLEEP)
        try:
            # Death is looked at before the ring: what the peer wrote last is then all there.
            if not self._gone and ((connection_ready and self._hung_up()) or process_ended):
                self._gone = True
                self._unwatch()
            self._move()
            if self._gone and not self._again:
                self._bury()
            elif not self._gone:
                self.look(now)
        except (SegmentError, NoMemory) as error:
            self._refuse(error)

    def _move(self) -> None:
        """Bytes, as long as there are some; but one long message at most: its receiver finds it in the cache."""
        moved, left, self._in.whole = True, TURN_BYTES, False
        while moved and left > 0 and not self._in.whole:
            done = self._take_frames(left)
            if not self._gone:
                done += self._in.read(left) + self._out.give(left, self._publish)
            moved, left = done > 0, left - done
            self._publish()
        self._again = moved

    def _take_frames(self, limit: int) -> int:
        taken = 0
        while taken < limit and not self._in.whole and self._reader.more():
            frame, payload = self._reader.take()
            taken += frame.size or 1
            if frame.kind == Kind.EAGER:
                self._in.eager(frame, payload)
            elif frame.kind == Kind.PIECE:
                self._in.piece(frame, payload)
                self._publish()
            elif frame.size:
                raise SegmentError(f"a frame of kind {frame.kind} with a payload of {frame.size} bytes")
            elif frame.kind == Kind.OFFER:
                self._in.offer(frame)
            elif frame.kind == Kind.PULL:
                self._out.pulled(frame)
            elif frame.kind == Kind.TAKEN:
                self._out.taken(frame)
            else:
                raise SegmentError(f"a frame of kind {frame.kind}: there is none")
        return taken

    @property
    def deadline(self) -> float | None:
        """When `progress` must come though no descriptor is ready; 0 for at once. None if never."""
        if self.ended:
            return None
        if self._again:
            return 0.0
        return None if self._stopped is None or self._gone else self._look_due_s

    # ---------------------------------------------------------------- waking

    def arm(self) -> None:
        """The caller is about to wait: the peer shall ring. Finds out whether there is something to do after all."""
        if self.ended or self._again or self._gone:
            return
        blocked = self._out.blocked
        flags = _ASLEEP + (_WANTS_ROOM if blocked else 0)
        if self._armed == flags:
            return  # and since then the peer has rung
        self._sleeps += 1
        self._own.store(Word.ASLEEP, self._sleeps * _SLEEP + flags)
        self._armed = flags
        self._fence()  # either we see the peer's last word now, or it sees that we sleep
        try:
            self._again = self._reader.more() or (blocked and self._writer.moved())
        except SegmentError as error:
            self._refuse(error)

    def _publish(self) -> None:
        """Let the peer see what was put and what was read, and wake it if it waits for that."""
        published, released = self._writer.publish(), self._reader.release()
        if not (published or released):
            return
        self._fence()
        asleep = self._theirs.load(Word.ASLEEP)
        if asleep & _ASLEEP and (published or asleep & _WANTS_ROOM) and asleep // _SLEEP != self._rung:
            self._rung = asleep // _SLEEP
            try:
                self._connection.send(b"\0")
            except OSError:  # full: enough wake-ups are queued already; broken: its descriptor reports it
                pass

    def look(self, now: float) -> None:
        """At the state of the peer's process, and at what it waits for, if it is time; also while other links are still being
        made."""
        if self._stopped is None or now < self._look_due_s:
            return
        self._look_due_s = now + self._stopped.look_s
        if self._stopped.look(is_stopped(self._pid), now):
            self._lose(f"the process of rank {self.peer} on this host has been stopped for {self._stopped.for_s:.2f} s")
            return
        self._own.store(Word.AWAITED, awaited((*self._out.unfinished_names(), *self._in.awaited_names())))
        if differs := self._agreement.unexpected(self._theirs.load(Word.AWAITED)):
            self._refuse(SegmentError(differs))

    # ---------------------------------------------------------------- ends

    def _hung_up(self) -> bool:
        """Read the wake-up bytes. Returns whether the connection has ended."""
        try:
            while self._connection.recv(16):
                pass
            return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _bury(self) -> None:
        """The peer is gone and all it wrote was read: why did it go?"""
        state = self._theirs.load(Word.STATE)
        if state == State.ABORTED:
            cause = self._theirs.read_cause()
            self._leave(State.CLOSED)
            self._outcome(PeerAborted(self.peer, cause))
        elif state == State.REFUSED:
            self._lose(f"rank {self.peer} gave the link up: {self._theirs.read_cause().what}")
        elif state != State.CLOSED:
            self._lose(f"the process of rank {self.peer} ended")
        elif (name := self._in.awaited()) is not None:
            self._lose(f"rank {self.peer} closed its end before it sent message {name}")
        elif (name := self._out.unfinished()) is not None:
            self._lose(f"rank {self.peer} closed its end before it took message {name}")

    def _refuse(self, error: SegmentError | NoMemory) -> None:
        if isinstance(error, NoMemory):
            self._lose(f"no memory on this host for messages to rank {self.peer}: {error}")
        else:
            self._lose(f"rank {self.peer} broke the rules of the link: {error}", str(error))

    def _lose(self, what: str, told: str = "") -> None:
        """End the link because of `what`, and send the reason to the peer (`told`, if the peer's text should differ)."""
        self._own.put_cause(Cause(told or what))
        self._leave(State.REFUSED)
        self._outcome(Lost(self.peer, Cause(what)))

    def _leave(self, state: State) -> None:
        """End: no offer stands any more, the peer finds `state`, descriptors and memory are given up."""
        self.ended = True
        self._out.end()
        self._writer.publish()
        self._fence()
        self._own.store(Word.STATE, state)
        self._fence()
        self._unwatch()
        self._in.end()
        self._own.close()
        self._theirs.close()

    def disown(self) -> None:
        """In a forked child, where it is the parent's link: let go of it and say nothing."""
        if self.ended:
            return
        self.ended = True
        self._connection.close()
        if self._process >= 0:
            os.close(self._process)
        self._in.end()
        self._own.close()
        self._theirs.close()

    def _unwatch(self) -> None:
        if self._connection.fileno() >= 0:
            self._watch.remove(self._connection.fileno())
            self._connection.close()
        if self._process >= 0:
            self._watch.remove(self._process)
            os.close(self._process)
            self._process = -1
