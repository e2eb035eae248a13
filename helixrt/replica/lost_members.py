"""Sends requests to the lighthouse for members that have ended, so that the others do not wait for them.

In: the members of the last quorum, and the run's store, which knows a fraction of a second after a process has gone that its
incarnation has ended (`ended_key`). Out: quorums without delay.

The lighthouse forms a quorum at once when every member of the last one has asked again; for one that died it waits until
its last heartbeat is too old, seconds in which all survivors wait. So a replica that waits for a quorum sends its request
too, marked as ended, and all members leave it out. For the lighthouse it remains a member, so a request for it is sent in every
later quorum as well, until its successor, which the lighthouse knows by the same name, asks by itself. The successor says so in
the store before (`asks_key`): of two requests by one name the later counts. More than `MOST` replicas that are away at a time
are dropped, and the next quorum waits for their heartbeats to pass, once.

No request is sent for a member that does not respond and has not ended (stopped process, host cut off): its heartbeats decide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from helixrt.errors import Retryable
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import asks_key, ended_key

GONE = "gone"  # key of the data of a request in another's name: its newest incarnation that has ended
MOST = 8  # each costs a request per step
_LOOK_S = 0.02  # how often to look into the store while a quorum is awaited
ASK_S = 1.0  # one question; a longer wait asks again


class LostMembers:
    """Of the replica `me`, in the run whose store this is.

    `ask(replica, incarnation)` asks for a quorum in the name of the replica, of which this incarnation has ended, and blocks
    until there is one, for `ASK_S` at most; it raises nothing. It runs in a thread for each replica, and what reads `store` in
    another.
    """

    def __init__(self, me: int, ask: Callable[[int, int], None], store: RunStore) -> None:
        self._me, self._ask, self._store = me, ask, store
        self._changed = threading.Condition()  # guards everything below
        self._others: dict[int, int] = {}  # members of the last quorum: by replica, the incarnation that asked or has ended
        self._asking = self._closed = False
        self._speaking: dict[int, threading.Thread] = {}
        self._watcher: threading.Thread | None = None

    @contextmanager
    def spoken_for(self) -> Iterator[None]:
        """While the caller waits for a quorum."""
        with self._changed:
            if self._others and self._watcher is None and not self._closed:
                self._watcher = threading.Thread(target=self._watch, name=f"helixrt-lost-members-{self._me}", daemon=True)
                self._watcher.start()
            self._asking = True
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._asking = False
                self._changed.notify_all()

    def formed(self, members: Mapping[int, int], gone: Mapping[int, int]) -> None:
        """There was a quorum of `members` (incarnations by replica); for those in `gone` requests were sent by others."""
        with self._changed:
            self._others = {**members, **(gone if len(gone) <= MOST else {})}
            self._others.pop(self._me, None)

    def close(self) -> None:
        """End the threads; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = [t for t in (self._watcher, *self._speaking.values()) if t is not None]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(2 * ASK_S)

    # ---------------------------------------------------------------- the watcher's thread

    def _watch(self) -> None:
        while self._await_question():
            others = self._others
            self._speak(others, {replica: self._ended(replica, known) for replica, known in others.items()})
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._asking, _LOOK_S)

    def _await_question(self) -> bool:
        """Until a replica waits for a quorum; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._asking and bool(self._others)))
            return not self._closed

    def _ended(self, replica: int, incarnation: int) -> int | None:
        """The newest incarnation of it, from this one on, that has ended; None if this one has not, or a later one asks by
        itself."""
        following = incarnation
        try:
            while self._store.get(ended_key(replica, following)) is not None:
                following += 1
            if following > incarnation and self._store.get(asks_key(replica, following)) is None:
                return following - 1
        except Retryable:
            pass  # the store is away: its heartbeats will tell
        return None

    def _speak(self, others: Mapping[int, int], ended_of: Mapping[int, int | None]) -> None:
        """Ask for all that are gone, but those whose last question waits still. `others`: the quorum that was looked at."""
        with self._changed:
            if not self._asking or self._closed or others is not self._others:
                return
            for replica, ended in ended_of.items():
                speaking = self._speaking.get(replica)
                if ended is not None and (speaking is None or not speaking.is_alive()):
                    name = f"helixrt-lost-member-{replica}:{ended}"
                    self._speaking[replica] = threading.Thread(target=self._ask, args=(replica, ended), name=name, daemon=True)
                    self._speaking[replica].start()
            self._speaking = {replica: thread for replica, thread in self._speaking.items() if thread.is_alive()}
