"""The membership of a run without torchft: quorums over the run's store alone (`protocol.store_quorum`).

In: a replica's account of itself. Out: `Formed`, the same on all of its members. A thread of this process sends the signs of
life, so a call of user code that keeps the interpreter lock for longer than the heartbeat limit makes the others continue
without this replica, until it runs again; torchft's membership has a process of its own for that.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from helixrt.errors import Retryable
from helixrt.protocol.step.quorum import Member
from helixrt.protocol.store_quorum import (
    Delete,
    Get,
    Operation,
    Over,
    Pause,
    PutIfAbsent,
    QuorumRules,
    Reply,
    Set,
    Stamp,
    StoreQuorum,
)
from helixrt.replica.contracts import Formed, Membership, RunStore
from helixrt.replica.run_keys import ended_key
from helixrt.timeouts import Timeouts
from helixrt.transport.monitor import client as monitor_client
from helixrt.transport.monitor.client import Monitor, give_back, lease
from helixrt.transport.monitor.wire import State

_DEPENDENT = 1 / 8  # of a membership beat: the period at which other processes of a replica are watched
_WITHHELD_S = 0.02
T = TypeVar("T")


def newest_incarnations(members: Iterable[Member]) -> tuple[Member, ...]:
    """One member per replica, in order of replica ids: a predecessor that still seems alive is dead."""
    newest: dict[int, Member] = {}
    for member in members:
        known = newest.get(member.replica)
        if known is None or member.incarnation > known.incarnation:
            newest[member.replica] = member
    return tuple(newest[replica] for replica in sorted(newest))


class StoreMembership(Membership):
    """A replica's place in the quorums of `store`. `run_epoch_s` is the same for all replicas of the run.

    From `announce` to `close` a thread sends signs of life. It withholds them while another process of the replica is stopped
    (`depend_on`). `host`: where monitors of this host meet.
    """

    def __init__(
        self,
        replica: int,
        incarnation: int,
        store: RunStore,
        timeouts: Timeouts,
        run_epoch_s: float,
        host: str = "127.0.0.1",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._timeouts, self._run_epoch_s, self._clock = store, timeouts, run_epoch_s, clock
        self._host = host
        rules = QuorumRules(timeouts.heartbeat_limit_s, timeouts.join_s)
        self._quorums = StoreQuorum((replica, incarnation), rules, ended_key)
        self._name = f"{replica}:{incarnation}"
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._heart: threading.Thread | None = None
        self._announced = False
        self._monitor: Monitor | None = None
        self._watched: list[int] = []

    def depend_on(self, monitors: Iterable[bytes], secret: bytes) -> None:
        """To be called before `announce`: the replica is a member only while the ranks of these monitors run as well."""
        addresses = list(monitors)
        if addresses and monitor_client.unsupported() is None:
            self._monitor = lease(self._host)
            period_s = _DEPENDENT * self._timeouts.heartbeat_s
            self._watched += [self._monitor.watch(address, secret, period_s) for address in addresses]

    def announce(self) -> None:
        with self._lock:
            if self._announced or self._stop.is_set():
                return
            try:
                self._carry_out(self._quorums.announce())
            except Retryable:
                return  # `join` announces again, and has someone to tell
            self._announced = True
            self._heart = threading.Thread(target=self._beat, name=f"helixrt-heartbeat-{self._name}", daemon=True)
            self._heart.start()
        atexit.register(self.close)

    def join(self, me: Member, timeout_s: float) -> Formed:
        if self._stop.is_set():
            raise Retryable("the membership was closed")
        deadline = time.monotonic() + timeout_s + self._timeouts.heartbeat_limit_s  # one that has waited so long proposes
        self.announce()
        if not self._announced:
            raise Retryable("the run's store cannot be reached, so this replica could not announce itself")
        while why := self._withheld():
            if time.monotonic() >= deadline or self._stop.wait(_WITHHELD_S):
                raise Retryable(f"this replica takes no part: {why}")
        try:
            quorum = self._carry_out(self._quorums.join(me.to_plain()), deadline, timeout_s)
        except Over as over:
            raise Retryable(str(over)) from None
        return Formed(quorum.generation, newest_incarnations(Member.from_plain(told) for told in quorum.accounts))

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            heart, monitor, self._monitor = self._heart, self._monitor, None
        if heart is not None and heart is not threading.current_thread():
            heart.join(2 * self._timeouts.heartbeat_limit_s)
        if monitor is not None:
            for number in self._watched:
                monitor.forget(number)
            give_back(monitor)
        atexit.unregister(self.close)

    # ---------------------------------------------------------------- operations

    def _carry_out(
        self, operations: Generator[Operation, Reply, T], deadline: float | None = None, timeout_s: float = 0.0
    ) -> T:
        """Run the operations on the store. Raises Retryable without it, after `deadline`, or when the membership is closed."""
        reply: Reply | None = None
        try:
            while True:
                operation = next(operations) if reply is None else operations.send(reply)
                if isinstance(operation, Pause):
                    late = deadline is not None and time.monotonic() + operation.seconds >= deadline
                    why = "the membership was closed" if self._stop.wait(operation.seconds) else self._withheld()
                    if late or why:
                        self._execute(self._quorums.withdraw())
                        raise Retryable(f"no quorum formed within {timeout_s:g} s" + (f": {why}" if why else ""))
                reply = Reply(self._execute(operation), time.monotonic())
        except StopIteration as ended:
            result: T = ended.value
            return result

    def _execute(self, operation: Operation) -> str | None:
        match operation:
            case Get(key):
                return self._store.get(key)
            case Set(key, value):
                self._store.set(key, value)
            case PutIfAbsent(key, value):
                return self._store.put_if_absent(key, value)
            case Delete(key):
                self._store.delete(key)
            case Stamp():
                return str(round((self._clock() - self._run_epoch_s) * 1_000_000))
        return None

    # ---------------------------------------------------------------- signs of life

    def _withheld(self) -> str:
        """Why this replica gives no signs of life; empty: it does."""
        with self._lock:
            if self._monitor is None:
                return ""
            self._monitor.look()
            if self._monitor.ended:
                return ""
            states = [self._monitor.state(number) for number in self._watched]
            return next((f"one of its ranks is {state.value}" for state in states if state is not State.RUNNING), "")

    def _beat(self) -> None:
        while not self._stop.wait(self._timeouts.heartbeat_period_s):
            if not self._withheld():
                try:
                    self._execute(self._quorums.beat())
                except Retryable:
                    continue  # a store out of reach shows in `join`
