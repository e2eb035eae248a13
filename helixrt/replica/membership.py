"""Who takes part in a step, from torchft's lighthouse; and the membership of a run of one replica.

In: a replica's account of itself (`protocol.step.quorum.Member`). Out: `Formed`, the same on all of its members.

What the lighthouse does (torchft 0.2, found by trying), which the step protocol may count on:

- A quorum answers everyone in it with the same participants and the same time stamp `created`,
  computed again for every quorum, also when the members have not changed.
- *Fast quorum*: once every member of the last quorum has asked again, the quorum forms at once, with
  the others that have asked by then. A replica that only sends heartbeats is not waited for in this case:
  it joins a running job by asking, and is in the next quorum.
- Otherwise (the first quorum of a run, or a member of the last one is missing) more than half of
  the replicas that send heartbeats must have asked, and living ones that have not are waited for up
  to the join timeout, counted from the first that asked.
- A member that dies is waited for until its last heartbeat is older than the heartbeat timeout,
  unless a request is sent for it (`lost_members`).
- A `join` given up by its caller is not withdrawn at the server: until its heartbeat stops, the
  next quorum may still count it in. The others then fail to connect to it, which is Retryable.

The blocking call releases the interpreter lock, so `join` may run beside compute.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from helixrt.errors import Cause, MissingExtra, Retryable
from helixrt.protocol.step.quorum import Member
from helixrt.replica.contracts import Formed, Membership, RunStore
from helixrt.replica.lighthouse import begin_lighthouse
from helixrt.replica.lighthouse_beats_private import library
from helixrt.replica.lost_members import ASK_S, GONE, LostMembers
from helixrt.replica.run_keys import asks_key, ended_key
from helixrt.timeouts import Timeouts
from helixrt.transport.monitor import client as monitor_client
from helixrt.transport.monitor.client import Monitor, give_back, lease

_BEATS = "helixrt.replica.lighthouse_beats_private"  # in the monitor process
_DEPENDENT = 1 / 8  # of a membership beat: the period at which other processes of a replica are watched
_WITHHELD_S = 0.02


def _coordination() -> Any:
    try:
        from torchft import coordination
    except ImportError as error:
        raise MissingExtra("torchft", "ft", "a run of several replicas") from error
    return coordination


def serve_lighthouse(timeouts: Timeouts, host: str = "127.0.0.1") -> tuple[Any, str]:
    """Start a lighthouse on `host`, for the driver; returns the server (has `shutdown()`) and its address."""
    return begin_lighthouse(_coordination().LighthouseServer, timeouts, host)


def time_stamp(created_s: int, created_ns: int, run_epoch_s: float) -> int:
    """A quorum's time stamp as whole microseconds of the run.

    Quorums follow each other within a millisecond or two, so milliseconds could repeat.
    """
    epoch_us = round(run_epoch_s * 1_000_000)
    return created_s * 1_000_000 + created_ns // 1000 - epoch_us


class TorchftMembership(Membership):
    """A replica's place at a lighthouse, where all its incarnations have one name: who comes back takes the place of who has
    gone, which need not first lose it.

    `lighthouse` is the address from `serve_lighthouse`; `run_epoch_s` is the same for all replicas
    and all drivers of the run. `store`: the run's, which knows which incarnations the driver has seen end.

    From `announce` to `close` this rank's monitor process sends the heartbeats, so they depend neither on the interpreter lock
    nor on user code. It withholds them while this process is stopped, while another process of the replica is (`depend_on`),
    and when the interpreter of this process has not run for `timeouts.step_s`. `host`: where monitors of this host meet.
    """

    def __init__(
        self,
        replica: int,
        incarnation: int,
        lighthouse: str,
        store: RunStore,
        timeouts: Timeouts,
        run_epoch_s: float,
        host: str = "127.0.0.1",
    ) -> None:
        self._id = str(replica)
        self._name = f"{replica}:{incarnation}"  # of this life, among the members of this host
        self._address, self._store, self._says_so = lighthouse, store, False  # that it asks
        self._timeouts = timeouts
        self._run_epoch_s = run_epoch_s
        self._coordination = _coordination()
        self._client: Any = None  # of `join`, until `close`
        self._lost = LostMembers(replica, self._ask_for, store)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._heart: threading.Thread | None = None
        self._monitor: Monitor | None = None
        self._watched: list[int] = []
        if monitor_client.unsupported() is None:
            self._monitor = lease(host)
            self._monitor.start()

    def announce(self) -> None:
        with self._lock:
            if self._heart is not None or self._stop.is_set():
                return
            self._try_heartbeat(None)  # the first one before this returns: replicas that join afterwards wait for this one
            if self._monitor is not None:
                arguments: dict[str, Any] = {"library": library(), "lighthouse": self._address, "member": self._id}
                arguments["timeout_s"] = self._call_timeout_s
                self._monitor.beat(self._name, _BEATS, arguments, self._timeouts.heartbeat_period_s, self._timeouts.step_s)
                for number in self._watched:
                    self._monitor.depend(self._name, number)
            self._heart = threading.Thread(target=self._beat, name=f"helixrt-heartbeat-{self._name}", daemon=True)
            self._heart.start()
        # The thread must be gone before the interpreter is: its native call cannot be unwound.
        atexit.register(self.close)

    def depend_on(self, monitors: Iterable[bytes], secret: bytes) -> None:
        """To be called before `announce`: the replica is a member only while the ranks of these monitors run as well."""
        if self._monitor is not None:
            period_s = _DEPENDENT * self._timeouts.heartbeat_s
            self._watched += [self._monitor.watch(address, secret, period_s) for address in monitors]

    def join(self, me: Member, timeout_s: float) -> Formed:
        self.announce()
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if why := self._withheld():  # to ask is a sign of life too
                if left_s <= _WITHHELD_S or self._stop.wait(_WITHHELD_S):
                    raise Retryable(f"this replica takes no part: {why}")
                continue
            if self._store.get(ended_key(me.replica, me.incarnation)) is not None:  # its successor has the name
                raise Retryable(f"the driver saw incarnation {me.incarnation} of replica {me.replica} end; it is over")
            formed = self._ask(me, left_s)
            if any(m.replica == me.replica and m.incarnation == me.incarnation for m in formed.members):
                return formed
        raise Retryable(f"no quorum formed within {timeout_s:g} s")

    def _ask(self, me: Member, timeout_s: float) -> Formed:
        try:
            client = self._client = self._client or self._connect()
            if not self._says_so:  # others ask in its name no more, and wait for it from now on
                self._store.put_if_absent(asks_key(me.replica, me.incarnation), "yes")
                self._says_so = True
            with self._lost.spoken_for():
                quorum = client.quorum(
                    replica_id=self._id, timeout=timedelta(seconds=timeout_s), step=me.step, data=me.to_plain()
                )
        except (TimeoutError, RuntimeError, OSError) as error:
            client = self._client = None
            late = isinstance(error, TimeoutError)
            what = f"no quorum formed within {timeout_s:g} s" if late else "the lighthouse cannot be reached"
            raise Retryable(Cause(f"{what} ({self._address}): {error}")) from error
        told = {int(p.replica_id): p.data for p in quorum.participants if p.data}
        gone = {replica: data[GONE] for replica, data in told.items() if GONE in data}
        members = tuple(Member.from_plain(told[replica]) for replica in sorted(told.keys() - gone.keys()))
        self._lost.formed({member.replica: member.incarnation for member in members}, gone)
        return Formed(time_stamp(quorum.created.seconds, quorum.created.nanos, self._run_epoch_s), members)

    def _ask_for(self, replica: int, ended: int) -> None:
        try:
            self._connect().quorum(replica_id=str(replica), timeout=timedelta(seconds=ASK_S), step=0, data={GONE: ended})
        except (TimeoutError, RuntimeError, OSError):
            pass  # asked all the same, or the lighthouse is away, which shows in `join`

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            heart = self._heart
        if heart is not None and heart is not threading.current_thread():
            heart.join(2 * self._call_timeout_s)
        with self._lock:
            monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.rest(self._name)
            for number in self._watched:
                monitor.forget(number)
            give_back(monitor)
        self._lost.close()
        self._client = None  # with it its native threads end
        atexit.unregister(self.close)

    @property
    def _call_timeout_s(self) -> float:
        return self._timeouts.heartbeat_limit_s

    def _withheld(self) -> str:
        """Why the monitor sends no heartbeats; empty: it does."""
        with self._lock:
            if self._monitor is None:
                return ""
            self._monitor.look()
            return "" if self._monitor.ended else self._monitor.withheld(self._name)

    def _connect(self) -> Any:
        return self._coordination.LighthouseClient(self._address, timedelta(seconds=self._call_timeout_s))

    def _beat(self) -> None:
        """Tell the monitor that this interpreter runs; until it sends heartbeats itself, and without one, send them."""
        client: Any = None
        while not self._stop.is_set():
            with self._lock:
                monitor = self._monitor
            if monitor is not None:
                monitor.look()
                monitor.alive(self._name)
            if monitor is None or monitor.ended or not monitor.beating(self._name):
                client = self._try_heartbeat(client)
            self._stop.wait(self._timeouts.heartbeat_period_s)

    def _try_heartbeat(self, client: Any) -> Any:
        """Beat once; returns the client to beat with again, None if the connection broke."""
        try:
            client = client or self._connect()
            client.heartbeat(self._id, timedelta(seconds=self._call_timeout_s))
            return client
        except (TimeoutError, RuntimeError, OSError):
            return None  # a lighthouse out of reach shows in `join`, which has someone to tell


class SoloMembership(Membership):
    """The membership of a run of one replica: every quorum is that replica. Needs no server.

    Generations are microseconds of the run by `clock` (Unix time in seconds), and grow even when
    the clock does not.
    """

    alone = True

    def __init__(self, run_epoch_s: float, clock: Callable[[], float] = time.time) -> None:
        self._run_epoch_s, self._clock = run_epoch_s, clock
        self._last = 0
        self._closed = False

    def announce(self) -> None:
        pass

    def join(self, me: Member, timeout_s: float) -> Formed:
        if self._closed:
            raise Retryable("the membership was closed")
        self._last = max(self._last + 1, round((self._clock() - self._run_epoch_s) * 1_000_000))
        return Formed(self._last, (me,))

    def close(self) -> None:
        self._closed = True
