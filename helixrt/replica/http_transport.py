"""State from peers over HTTP/1.1: the transport that needs nothing but sockets.

A GET names an offer, a range of its bytes and the layout both sides should have. The client proves
knowledge of the run's secret by an HMAC over a nonce and the request; the answer's checksum is keyed
with the secret and covers nonce, request and bytes, so it proves the donor too and cannot be replayed.
The bytes go out of the tensors' own memory. Nothing that arrives is unpickled; lengths are what was agreed.

    GET /layout/NAME                                          X-Helixrt-Nonce, X-Helixrt-Proof
    GET /state/NAME?begin=0&end=65536&layout=DIGEST           the same
    200  Content-Length: 65536                                X-Helixrt-Checksum
    (of a layout: as long as it is, up to a limit that the asking side has)
    403 no proof   404 no such offer   409 another layout   416 no such range

Serving is paced (`serving_pace`), so that a training step beside it is hardly slowed. If an offer is withdrawn while its
bytes are sent, the connection is broken off.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from helixrt.protocol.catchup import FetchRules, Piece
from helixrt.replica.fetch import DonorGone, DonorLink
from helixrt.replica.manifest import LAYOUT_LIMIT_BYTES
from helixrt.replica.offering import OfferingTransport
from helixrt.replica.state_bytes import StateBytes

_NONCE, _PROOF, _CHECKSUM = "X-Helixrt-Nonce", "X-Helixrt-Proof", "X-Helixrt-Checksum"
_IDLE_S = 60.0
_CHUNK_BYTES = 1 << 17  # that are sent, or received, at a time


def _key(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"helixrt-state").digest()


def _proof(key: bytes, nonce: str, target: str) -> str:
    return hmac.new(key, f"{nonce} {target}".encode(), hashlib.sha256).hexdigest()


def _checksum(key: bytes, nonce: str, target: str, parts: Sequence[memoryview]) -> str:
    digest = hashlib.blake2b(f"{nonce} {target}\n".encode(), key=key, digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class HttpTransport(OfferingTransport):
    """Serves on `host` (a free port) to clients that know `secret`.

    `send` puts an answer's parts on the wire; tests replace it to spoil, delay or break off answers.
    """

    def __init__(
        self,
        secret: str,
        host: str = "127.0.0.1",
        serve_cpu: float = 0.0,
        serve_mb_s: float = 0.0,
        rules: FetchRules | None = None,
    ) -> None:
        super().__init__(serve_cpu, serve_mb_s, rules)
        self._key = _key(secret)
        self.refused = 0  # requests without proof
        self._server = _Server((host, 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="helixrt-state", daemon=True)
        self._thread.start()
        self._closed = False

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def link(self, donor: str, name: str, digest: str, wait_s: float) -> DonorLink:
        return _HttpLink(donor, self._key, f"/state/{quote(name, safe='')}", digest, wait_s)

    def ask_layout(self, donor: str, name: str, wait_s: float) -> bytes:
        link = _HttpLink(donor, self._key, "", "", wait_s)
        try:
            return link.read_all(f"/layout/{quote(name, safe='')}", LAYOUT_LIMIT_BYTES)
        finally:
            link.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)
            self.withdraw_all()

    def send(self, connection: socket.socket, parts: Iterable[memoryview]) -> None:
        """Put the bytes of an answer on the wire, as they are given."""
        for part in parts:
            connection.sendall(part)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        transport = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _IDLE_S
            disable_nagle_algorithm = True
            accounted_s = 0.0  # of this connection's thread

            def do_GET(self) -> None:
                transport._answer(self)
                # The whole of the thread's time since the last request: reading one costs as well.
                used_s = time.thread_time()
                sleep_s = transport._pace.spent(used_s - self.accounted_s)
                self.accounted_s = used_s
                if sleep_s:
                    time.sleep(sleep_s)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        target, nonce = request.path, request.headers.get(_NONCE, "")
        given = request.headers.get(_PROOF, "").encode("utf-8", "replace")
        if not nonce or not hmac.compare_digest(given, _proof(self._key, nonce, target).encode()):
            with self._offered:
                self.refused += 1
            request.close_connection = True
            return _refuse(request, 403)
        url = urlsplit(target)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        folder, _, name = url.path.rpartition("/")
        if folder == "/layout":
            return self._answer_layout(request, unquote(name))
        state = self.find(unquote(name)) if folder == "/state" else None
        if state is None:
            return _refuse(request, 404)
        if query.get("layout") != state.digest:
            return _refuse(request, 409)
        try:
            piece = Piece(int(query.get("begin", "")), int(query.get("end", "")))
        except ValueError:
            return _refuse(request, 416)
        if not 0 <= piece.begin < piece.end <= state.nbytes:
            return _refuse(request, 416)
        parts = state.views(piece)
        checksum = _checksum(self._key, nonce, target, parts)
        if not self.still_offers(unquote(name), state):  # what was summed up may have been reused already
            return _refuse(request, 404)
        _accept(request, piece.nbytes, checksum)
        try:
            self.send(request.connection, self._while_offered(unquote(name), state, parts))
        except _Withdrawn:
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)

    def _answer_layout(self, request: BaseHTTPRequestHandler, name: str) -> None:
        text = self.layout_json(name)
        if text is None:
            return _refuse(request, 404)
        parts = [memoryview(text)]
        _accept(request, len(text), _checksum(self._key, request.headers[_NONCE], request.path, parts))
        self.send(request.connection, parts)

    def _while_offered(self, name: str, state: StateBytes, parts: Sequence[memoryview]) -> Iterator[memoryview]:
        """The bytes of an answer at the pace of `serve_mb_s`. Raises _Withdrawn when they may change from now on."""
        for part in parts:
            for begin in range(0, len(part), _CHUNK_BYTES):
                if not self.still_offers(name, state):
                    raise _Withdrawn
                chunk = part[begin : begin + _CHUNK_BYTES]
                yield chunk
                if sleep_s := self._pace.sent(len(chunk)):
                    time.sleep(sleep_s)


class _Withdrawn(Exception):
    """What is being sent is not offered any more."""


def _accept(request: BaseHTTPRequestHandler, nbytes: int, checksum: str) -> None:
    request.send_response_only(200)
    request.send_header("Content-Length", str(nbytes))
    request.send_header(_CHECKSUM, checksum)
    request.end_headers()


def _refuse(request: BaseHTTPRequestHandler, status: int) -> None:
    request.send_response_only(status)
    request.send_header("Content-Length", "0")
    request.end_headers()


class _Server(ThreadingHTTPServer):
    """Its connections end with it, and a peer that breaks off is nothing to print."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer would look the host's name up here, which can take seconds and is not needed.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            self._connections.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections.discard(request)

    def server_close(self) -> None:
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # gone already
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _HttpLink(DonorLink):
    """A persistent connection to one donor; connects when first used. Its timeout bounds one wait for bytes."""

    def __init__(self, donor: str, key: bytes, path: str, digest: str, wait_s: float) -> None:
        host, _, port = donor.rpartition(":")
        self._donor, self._key, self._path, self._digest = donor, key, path, digest
        self._connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=wait_s)
        self._cut = False

    def read(self, piece: Piece, into: memoryview, heard: Callable[[], None]) -> bool:
        target = f"{self._path}?begin={piece.begin}&end={piece.end}&layout={self._digest}"
        nonce = secrets.token_hex(16)
        try:
            answer = self._ask(target, nonce)
            if answer.headers.get("Content-Length") != str(piece.nbytes):
                raise DonorGone(f"{self._donor} sends {answer.headers.get('Content-Length')} bytes, not {piece.nbytes}")
            at = 0
            while at < piece.nbytes:
                got = answer.readinto(into[at : at + _CHUNK_BYTES])
                if not got:
                    raise DonorGone(f"{self._donor} broke off")
                at += got
                heard()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise DonorGone(f"{self._donor}: {error or type(error).__name__}") from error
        return self._intact(answer, nonce, target, into)

    def read_all(self, target: str, limit_bytes: int) -> bytes:
        """An answer whose length only the donor knows. Raises DonorGone, also for one above the limit or spoilt."""
        nonce = secrets.token_hex(16)
        try:
            answer = self._ask(target, nonce)
            length = answer.headers.get("Content-Length", "")
            if not length.isascii() or not length.isdigit() or int(length) > limit_bytes:
                raise DonorGone(f"{self._donor} sends {length[:30] or 'unknown'} bytes; at most {limit_bytes} are accepted")
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise DonorGone(f"{self._donor}: {error or type(error).__name__}") from error
        if not self._intact(answer, nonce, target, memoryview(data)):
            raise DonorGone(f"{self._donor} sends an answer with a wrong checksum")
        return data

    def _ask(self, target: str, nonce: str) -> http.client.HTTPResponse:
        """Connect if need be, and ask; the answer's head. Raises DonorGone for a refusal."""
        if self._connection.sock is None:
            self._connection.connect()
        if self._cut:
            raise DonorGone(f"{self._donor} was given up")
        self._connection.request("GET", target, headers={_NONCE: nonce, _PROOF: _proof(self._key, nonce, target)})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise DonorGone(f"{self._donor} answered {answer.status} {_MEANING.get(answer.status, answer.reason)}")
        return answer

    def _intact(self, answer: http.client.HTTPResponse, nonce: str, target: str, data: memoryview) -> bool:
        expected = _checksum(self._key, nonce, target, [data])
        return hmac.compare_digest(answer.headers.get(_CHECKSUM, "").encode("utf-8", "replace"), expected.encode())

    def cut(self) -> None:
        self._cut = True
        connected = self._connection.sock
        if connected is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected any more

    def close(self) -> None:
        self._connection.close()


_MEANING = {403: "(the run's secret is wrong)", 404: "(no such offer)", 409: "(another layout)", 416: "(no such range)"}
