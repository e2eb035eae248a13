"""Building queue pairs in the background, and telling the other end about them.

In: proved connections on the management network, one per rail and incarnation (`tcp.meeting`). Out: queue pairs that can
send at both ends, the default rail and the backups, long before a backup is needed.

SHIFT section 4.2 has one background thread execute the control verbs of backup devices, so that the application's set-up
is not slowed, and a store on the management network carry the attributes. Here every rail that comes up is one `Exchange`:

    lower rank                                higher rank
    [arm]  attributes               ->        [arm]
                                              [connect to them]
                                    <-        attributes
    [connect to them]  READY        ->

What stands in brackets is a job of the background thread, for all exchanges in the order in which they can go on. No job
waits for the other end: an exchange whose turn has not come leaves the thread to the others, which is the best-effort
order of SHIFT's appendix B, so rails that two ranks set up in different orders cannot wait for each other.

Why not through the run's store, which carries every rank's address (`Endpoint.connect` takes those from any store):

- Attributes hold the key to write into this process's memory. The connection is authenticated with the run's secret, and sends
  them to that peer alone; a store would give them to every reader, and accept them from every writer.
- They are of one life of a queue pair, and a rail may have many. They end with their connection; in a store, those of a life
  that is over would have to be distinguished from new ones, and deleted.
- A rail comes back when its two ends reach each other; nothing third has to be up, or be asked again and again.

Either way nothing goes over what the two ends did not agree on: an exchange that breaks or is late brings up no rail, and a
link that loses its last rail meanwhile ends with an error at both ends (`tests/transport/test_verbs_management.py`).
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from helixrt.protocol.link.frames import FrameError
from helixrt.protocol.link.messages import Failure
from helixrt.transport.tcp.watch import ENDED, READ, Watch
from helixrt.transport.verbs.devices import Descriptor
from helixrt.transport.verbs.queue_pair import QueuePair
from helixrt.transport.verbs.wire import ATTRIBUTES_BYTES, READY, Attributes, parse_attributes

_log = logging.getLogger("helixrt.transport")

Job = Callable[[], Any]
Then = Callable[[Any, BaseException | None], None]  # what came of a job, or why nothing did
SLOW_S, LONGEST_REST_S = 0.25, 30.0
_STOP = object()
_JOIN_S = 30.0  # for the jobs that are left when it is stopped; none waits longer than its kernel does
_CALL_S = 30.0  # for jobs before it; none of them waits for another machine longer than its kernel does


class Background:
    """One thread that runs jobs in their order; results are delivered in the thread that dispatches `watch`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: deque[tuple[Then, Any, BaseException | None]] = deque()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._descriptor = Descriptor(self._wakes)
        watch.add(self._descriptor, READ, lambda mask: self._tell())
        self._thread = threading.Thread(target=self._run, name="helixrt-verbs-setup", daemon=True)
        self._started = False

    def submit(self, job: Job, then: Then) -> None:
        if not self._started:
            self._started = True
            self._thread.start()
        self._jobs.put((job, then))

    def call(self, job: Job) -> Any:
        """Do a job there and wait for it: it must not wait for the other end."""
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def told() -> None:
            try:
                done.put((job(), None))
            except Exception as error:
                done.put((None, error))

        self.submit(told, lambda result, error: None)
        try:
            result, error = done.get(timeout=_CALL_S)
        except queue.Empty:
            raise TimeoutError(f"the set-up of verbs has made no progress for {_CALL_S:g} s") from None
        if error is not None:
            raise error
        return result

    def _run(self) -> None:
        while True:
            todo = self._jobs.get()
            if todo is _STOP:
                return
            job, then = todo
            try:
                done: tuple[Then, Any, BaseException | None] = (then, job(), None)
            except Exception as error:  # passed to the caller of the job
                done = (then, None, error)
            self._done.append(done)
            os.eventfd_write(self._wakes, 1)

    def _tell(self) -> None:
        try:
            os.eventfd_read(self._wakes)
        except BlockingIOError:
            pass
        while self._done:
            then, result, error = self._done.popleft()
            then(result, error)

    def stop(self) -> bool:
        """Do all jobs there are, tell what came of them, and end. False if that takes too long: then a job goes on, and what it
        uses must stay."""
        ended = True
        if self._started:
            self._jobs.put(_STOP)
            self._thread.join(_JOIN_S)
            ended = not self._thread.is_alive()
        self._watch.remove(self._descriptor)
        self._tell()
        if ended:
            os.close(self._wakes)
        else:
            _log.error("the set-up of verbs did not end within %g s; what it uses stays open until the process ends", _JOIN_S)
        return ended


class Rests:
    """Which rails are not to be connected for a while.

    Without an answer, the kernel looks for the peer's hardware address for about a second, and pyverbs holds the
    interpreter's lock all the while. So after an attempt that failed so, slowly, there is none for a second, then two, and so
    on.
    """

    def __init__(self) -> None:
        self._rests: dict[tuple[int, int], tuple[int, float]] = {}  # (rank, rail) -> how often in a row, until when

    def until(self, rail: tuple[int, int]) -> float:
        return self._rests.get(rail, (0, 0.0))[1]

    def failed(self, rail: tuple[int, int], took_s: float, now: float) -> float:
        """Connecting failed after so long. Returns when to report it: the receiver of the report tries again."""
        if took_s < SLOW_S:
            return now
        times = self._rests.get(rail, (0, 0.0))[0]
        self._rests[rail] = times + 1, now + min(LONGEST_REST_S, 2.0**times)
        return self.until(rail)

    def succeeded(self, rail: tuple[int, int]) -> None:
        self._rests.pop(rail, None)


class Exchange:
    """Brings one queue pair up over a proved connection. One of `joined` and `failed` is called, unless it is cancelled.

    `arm` gives a queue pair and its attributes, `connect` connects it to the other's: jobs for the background. `retire`
    takes one back.
    """

    def __init__(
        self,
        watch: Watch,
        background: Background,
        sock: socket.socket,
        dialled: bool,
        expires_s: float,
        arm: Callable[[], tuple[QueuePair, Attributes]],
        connect: Callable[[QueuePair, Attributes], None],
        retire: Callable[[QueuePair], None],
        joined: Callable[[QueuePair, Attributes], None],
        failed: Callable[[Failure, str], None],
    ) -> None:
        self._watch, self._background, self._sock, self._dialled = watch, background, sock, dialled
        self._connect_pair, self._retire, self._joined, self._failed = connect, retire, joined, failed
        self._pair: QueuePair | None = None
        self._ours: Attributes | None = None
        self._theirs: Attributes | None = None
        self._raw = b""
        self._busy = True  # a job is under way
        self._connected = False
        self.over = False
        self._timer = watch.at(expires_s, lambda: self._fail(Failure.PATH, "its queue pair was not set up in time"))
        watch.add(sock, READ, self._read)
        background.submit(arm, self._armed)

    # ---------------------------------------------------------------- jobs

    def _armed(self, result: tuple[QueuePair, Attributes] | None, error: BaseException | None) -> None:
        self._busy = False
        if result is not None:
            self._pair, self._ours = result
        if self.over:
            self._give_back()
        elif error is not None:
            self._fail(Failure.DEVICE, f"no queue pair can be made: {error}")
        else:
            if self._dialled:
                self._say_attributes()
            self._connect()

    def _connect(self) -> None:
        """As soon as both queue pairs are armed."""
        if self.over or self._busy or self._connected or self._pair is None or self._theirs is None:
            return
        self._busy = True
        self._background.submit(functools.partial(self._connect_pair, self._pair, self._theirs), self._is_connected)

    def _is_connected(self, result: None, error: BaseException | None) -> None:
        self._busy = False
        if self.over:
            self._give_back()
        elif error is not None:
            self._fail(Failure.PATH, f"its queue pair cannot be connected: {error}")
        elif self._dialled:
            self._connected = True
            if self._say(READY):
                self._join()
        else:
            self._connected = True
            self._say_attributes()

    # ---------------------------------------------------------------- the other end

    def _say_attributes(self) -> None:
        assert self._ours is not None
        self._say(self._ours.pack())

    def _say(self, word: bytes) -> bool:
        """A word fits the buffer of a connection that has carried so little."""
        try:
            said = self._sock.send(word, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(word)
        except OSError:
            said = False
        if not said and not self.over:
            self._fail(Failure.PATH, "the connection for its set-up broke")
        return said

    def _read(self, mask: int) -> None:
        wanted = len(READY) if self._theirs is not None else ATTRIBUTES_BYTES
        try:
            more = self._sock.recv(wanted - len(self._raw))
        except BlockingIOError:
            if mask & ENDED:
                self._fail(Failure.PATH, "the connection for its set-up broke")
            return
        except OSError:
            more = b""
        if not more:
            self._fail(Failure.PATH, "the other end gave up its set-up")
            return
        self._raw += more
        if len(self._raw) < wanted:
            return
        word, self._raw = self._raw, b""
        try:
            self._take(word)
        except FrameError as error:
            self._fail(Failure.PROGRAM, str(error))

    def _take(self, word: bytes) -> None:
        if self._theirs is None:
            self._theirs = parse_attributes(word)
            self._connect()
        elif word == READY and self._connected and not self._dialled:
            self._join()
        else:
            raise FrameError("a word that the set-up of a queue pair does not have")

    # ---------------------------------------------------------------- the end

    def _join(self) -> None:
        pair, theirs = self._pair, self._theirs
        assert pair is not None and theirs is not None
        self._pair = None
        self._release()
        self._joined(pair, theirs)

    def _fail(self, failure: Failure, reason: str) -> None:
        if not self.over:
            self.cancel()
            self._failed(failure, reason)

    def cancel(self) -> None:
        if not self.over:
            self._release()
            if not self._busy:
                self._give_back()

    def _give_back(self) -> None:
        if self._pair is not None:
            pair, self._pair = self._pair, None
            self._retire(pair)

    def _release(self) -> None:
        self.over = True
        self._timer.cancel()
        self._watch.remove(self._sock)
        self._sock.close()
