"""State from peers through Ray's object store.

A donor's actor answers `call_transport("serve_piece", …)` with a reference to `ray.put(bytes)`, which Ray
stores and moves as they are, and their checksum. Balance, checks and replacement of donors are those
of every transport (`replica.fetch`). Who may call an actor is Ray's matter: its control plane is trusted.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

from helixrt.errors import MissingExtra
from helixrt.protocol.catchup import FetchRules, Piece
from helixrt.ray_cluster.actors import CONTROL_GROUP, serve_transport
from helixrt.replica.fetch import DonorGone, DonorLink
from helixrt.replica.manifest import LAYOUT_LIMIT_BYTES
from helixrt.replica.offering import OfferingTransport

_LOOK_S = 0.2  # between two looks whether a read was given up


def _checksum(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class RayTransport(OfferingTransport):
    """Serves from the actor this process is, which delegates `call_transport` to it; `address` is its name.

    `name` replaces it if there is no actor (such a process can fetch, and serves no requests).
    """

    def __init__(
        self,
        name: str | None = None,
        serve_cpu: float = 0.0,
        serve_mb_s: float = 0.0,
        rules: FetchRules | None = None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("ray", "ray", "state transport through Ray") from error
        self._ray: Any = ray
        super().__init__(serve_cpu, serve_mb_s, rules)
        found = ray.get_runtime_context().get_actor_name() if name is None else name
        if not found:
            raise ValueError("other ranks find this one by its actor's name, and this actor has none")
        self._address: str = found
        serve_transport(self)

    @property
    def address(self) -> str:
        return self._address

    def link(self, donor: str, name: str, digest: str, wait_s: float) -> DonorLink:
        return _RayLink(self._ray, donor, name, digest, wait_s)

    def ask_layout(self, donor: str, name: str, wait_s: float) -> bytes:
        link = _RayLink(self._ray, donor, name, "", wait_s)
        try:
            text = link.call("serve_layout", name)
        finally:
            link.close()
        if not isinstance(text, bytes) or len(text) > LAYOUT_LIMIT_BYTES:
            raise DonorGone(f"{donor} sends something else than at most {LAYOUT_LIMIT_BYTES} bytes of a layout")
        return text

    def close(self) -> None:
        self.withdraw_all()
        serve_transport(None)

    def serve_piece(self, name: str, digest: str, begin: int, end: int) -> tuple[Any, str, float]:
        """For other ranks: a reference to the bytes, their checksum, and how long to wait before asking again.

        Raises LookupError when there is no such offer, layout or range.
        """
        began_s = time.thread_time()
        state = self.find(name)
        if state is None:
            raise LookupError(f"no offer {name!r}")
        if digest != state.digest:
            raise LookupError(f"the offer {name!r} has another layout")
        if not 0 <= begin < end <= state.nbytes:
            raise LookupError(f"the offer {name!r} has no bytes {begin} to {end}")
        data = b"".join(state.views(Piece(begin, end)))
        if not self.still_offers(name, state):  # what was copied may have been reused already
            raise LookupError(f"no offer {name!r}")
        answer = self.put(data), _checksum(data)
        return *answer, max(self._pace.spent(time.thread_time() - began_s), self._pace.sent(len(data)))

    def serve_layout(self, name: str) -> bytes:
        """For other ranks: the layout of an offer. Raises LookupError when there is no such offer."""
        text = self.layout_json(name)
        if text is None:
            raise LookupError(f"no offer {name!r}")
        return text

    def put(self, data: bytes) -> Any:
        """Put an answer's bytes into the object store; tests replace it to spoil or delay them."""
        return self._ray.put(data)


class _RayLink(DonorLink):
    """A donor's actor."""

    def __init__(self, ray: Any, donor: str, name: str, digest: str, wait_s: float) -> None:
        self._ray, self._donor, self._name, self._digest, self._wait_s = ray, donor, name, digest, wait_s
        self._cut = threading.Event()
        try:
            self._actor = ray.get_actor(donor)
        except ValueError as error:
            raise DonorGone(f"there is no actor {donor!r}") from error

    def read(self, piece: Piece, into: memoryview, heard: Callable[[], None]) -> bool:
        ref, checksum, sleep_s = self.call("serve_piece", self._name, self._digest, piece.begin, piece.end)
        heard()
        data = self._get(ref)
        if not isinstance(data, bytes) or len(data) != piece.nbytes:
            raise DonorGone(f"{self._donor} sends something else than {piece.nbytes} bytes")
        into[:] = data
        self._cut.wait(sleep_s)
        return _checksum(into) == checksum

    def call(self, method: str, *arguments: Any) -> Any:
        """What the donor's transport answers. Raises DonorGone."""
        remote = self._actor.call_transport.options(concurrency_group=CONTROL_GROUP)
        return self._get(remote.remote(method, *arguments))

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self.cut()

    def _get(self, ref: Any) -> Any:
        deadline = time.monotonic() + self._wait_s
        while not self._cut.is_set():
            try:
                return self._ray.get(ref, timeout=_LOOK_S)
            except self._ray.exceptions.GetTimeoutError:
                if time.monotonic() > deadline:
                    raise DonorGone(f"{self._donor} did not answer within {self._wait_s:g} s") from None
            except self._ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise DonorGone(f"{self._donor}: {lines[-1].strip()}") from error
        raise DonorGone(f"{self._donor} was given up")
