"""Sends requests to the lighthouse for members that have ended, so that the others do not wait for them.

In: the members of the last quorum, and which of them have ended according to the driver (in the run's store, a fraction of a
second after the process is gone). Out: quorums without delay.

The lighthouse forms a quorum at once when every member of the last one has asked again; for one that died it waits until
its last heartbeat is too old, seconds in which all survivors wait. So a replica that waits for a quorum sends its request
too, marked as ended, and all members leave it out. For the lighthouse it remains a member, so a request for it
is sent in every later quorum as well, until there are `MOST` of them: then all are dropped, and the next quorum waits for their
heartbeats to pass, once.

No request is sent for a member that does not respond and has not ended (stopped process, host cut off): its heartbeats decide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from helixrt.errors import Retryable

GONE = {"gone": True}  # the data of a request in another's name
MOST = 8  # each costs a request per step
_LOOK_S = 0.02  # how often to look into the store while a quorum is awaited
ASK_S = 1.0  # one question; a longer wait asks again

Lost = Callable[[int, int], bool]  # (replica, incarnation); raises Retryable


class LostMembers:
    """Of one replica, `me`. Ids are `replica:incarnation`.

    `ask(id)` asks for a quorum in the name of `id` and blocks until there is one, for `ASK_S` at most; it raises
    nothing. It runs in a thread for each id, `lost` in another.
    """

    def __init__(self, me: str, ask: Callable[[str], None], lost: Lost) -> None:
        self._me, self._ask, self._lost = me, ask, lost
        self._changed = threading.Condition()  # guards everything below
        self._others: set[str] = set()  # members of the last quorum
        self._gone: set[str] = set()
        self._asking = self._closed = False
        self._speaking: dict[str, threading.Thread] = {}
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

    def formed(self, members: Iterable[str], gone: Iterable[str]) -> None:
        """There was a quorum of `members`; requests for those in `gone` were sent by others."""
        with self._changed:
            self._others = set(members) - {self._me}
            self._gone = (self._gone & self._others) | (set(gone) - {self._me})
            if len(self._gone) > MOST:
                self._others -= self._gone
                self._gone.clear()

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
            for member in self._unsettled():
                if self._was_lost(member):
                    with self._changed:
                        self._gone.add(member)
            self._speak()
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._asking, _LOOK_S)

    def _await_question(self) -> bool:
        """Until a replica waits for a quorum; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._asking and bool(self._others)))
            return not self._closed

    def _unsettled(self) -> list[str]:
        with self._changed:
            return sorted(self._others - self._gone)

    def _was_lost(self, member: str) -> bool:
        replica, _, incarnation = member.partition(":")
        try:
            return self._lost(int(replica), int(incarnation))
        except Retryable:
            return False  # the store is away: its heartbeats will tell

    def _speak(self) -> None:
        """Ask for all that are gone, but those whose last question waits still."""
        with self._changed:
            if not self._asking or self._closed:
                return
            for member in self._gone:
                speaking = self._speaking.get(member)
                if speaking is None or not speaking.is_alive():
                    name = f"helixrt-lost-member-{member}"
                    self._speaking[member] = threading.Thread(target=self._ask, args=(member,), name=name, daemon=True)
                    self._speaking[member].start()
            self._speaking = {m: t for m, t in self._speaking.items() if t.is_alive()}
