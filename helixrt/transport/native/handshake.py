"""The handshake of the native data plane, the same over TCP (IPv4, IPv6) and over Unix sockets.

    connector                                listener
    Hello (protocol, who, what for, a nonce) ->
                                      <-     Challenge (protocol, a nonce of its own)
    proof over all of that            ->
                                      <-     verdict, its generation, and its proof over all of that

Each end's first eight bytes are a `Greeting`: the name of this protocol and the number of the frames that follow
(`hx_protocol`). They are the same in all versions, so ends of different versions can tell each other. The connector proves
first: an unauthenticated process receives only a nonce, and nothing is kept for it but its place among the half-open
connections (`admission`). Over a Unix socket the verdict of a rail carries a descriptor, the memory that both ends map. What
follows is not encrypted, as Gloo's and NCCL's is not.

In and out: bytes of fixed sizes; sockets are `admission`'s and `dial`'s.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from helixrt.transport import authentication
from helixrt.transport.tcp.rails import MAX_RAILS

_MAGIC = b"HLXN"
_GREETING = struct.Struct("<4sI")
_HELLO = struct.Struct("<BBHQIII32s")
_SAID = struct.Struct("<BQ")
GREETING_BYTES = _GREETING.size
HELLO_BYTES = _HELLO.size  # behind the greeting
CHALLENGE_BYTES = authentication.NONCE_BYTES  # behind the greeting
PROOF_BYTES = authentication.PROOF_BYTES
VERDICT_BYTES = _SAID.size + PROOF_BYTES
MAX_RANK = 2**31 - 1
MAX_NUMBER = 2**31 - 1
MAX_GENERATION = 2**63 - 1


class Purpose(IntEnum):
    """What a connection is for."""

    RAIL = 1  # frames of a link
    PROBE = 2  # whether a process listens, and where it is: closed after the verdict


class Verdict(IntEnum):
    """The listener's answer to a connector that proved the secret."""

    WELCOME = 0
    STALE = 1  # the listener is in a newer generation
    ENDED = 2  # its end of the link is over in this generation
    UNKNOWN = 3  # this generation has no such rank, rail or connection number here


class HandshakeError(Exception):
    """What came is not what a peer with the secret sends."""


class OtherProtocol(Exception):
    """The other end's frames have another number. The text names both."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(
            f"it uses protocol {theirs} of the native data plane, and this rank protocol {ours}: "
            "install the same version of helixrt on all hosts"
        )
        self.theirs = theirs


def pack_greeting(protocol: int) -> bytes:
    return _GREETING.pack(_MAGIC, protocol)


def check_greeting(raw: bytes, protocol: int) -> None:
    """Raises HandshakeError, OtherProtocol."""
    magic, theirs = _GREETING.unpack(raw)
    if magic != _MAGIC:
        raise HandshakeError("no greeting of the native data plane")
    if theirs != protocol:
        raise OtherProtocol(theirs, protocol)


@dataclass(frozen=True, slots=True)
class Hello:
    purpose: Purpose
    memory: bool  # over a Unix socket, to share memory
    generation: int
    sender: int  # ranks in that generation
    receiver: int
    rail: int
    number: int  # of the connection, from 1; 0 of a probe
    nonce: bytes

    def pack(self) -> bytes:
        """Without the greeting."""
        ranks = (self.sender, self.receiver)
        return _HELLO.pack(self.purpose, self.memory, self.rail, self.generation, *ranks, self.number, self.nonce)


def parse_hello(raw: bytes) -> Hello:
    """Raises HandshakeError for a value out of bounds."""
    purpose, memory, rail, generation, sender, receiver, number, nonce = _HELLO.unpack(raw)
    if purpose not in Purpose.__members__.values() or memory > 1:
        raise HandshakeError("a greeting for nothing that is known")
    if rail >= MAX_RAILS or max(sender, receiver) > MAX_RANK or generation > MAX_GENERATION:
        raise HandshakeError(f"a greeting of rank {sender} to rank {receiver}, rail {rail}, generation {generation}")
    if number > MAX_NUMBER or (number == 0) != (purpose == Purpose.PROBE):
        raise HandshakeError(f"a greeting with connection number {number}")
    return Hello(Purpose(purpose), bool(memory), generation, sender, receiver, rail, number, nonce)


@dataclass(frozen=True, slots=True)
class Proofs:
    """Makes and checks the proofs of one connection. `hello`: the connector's first bytes, without the greeting."""

    secret: bytes
    protocol: int
    hello: bytes
    nonce: bytes  # the listener's

    def connector(self) -> bytes:
        return self._meeting(b"").dialler_proof()

    def check_connector(self, proof: bytes) -> None:
        if not authentication.agrees(proof, self.connector()):
            raise HandshakeError("the connector does not know the run's secret")

    def verdict(self, verdict: Verdict, generation: int) -> bytes:
        """The listener's last word, with its proof."""
        said = _SAID.pack(verdict, generation)
        return said + self._meeting(said).answerer_proof()

    def parse_verdict(self, raw: bytes) -> tuple[Verdict, int]:
        """The verdict and the listener's generation."""
        said, proof = raw[: _SAID.size], raw[_SAID.size :]
        if not authentication.agrees(proof, self._meeting(said).answerer_proof()):
            raise HandshakeError("the listener does not know the run's secret")
        verdict, generation = _SAID.unpack(said)
        if verdict not in Verdict.__members__.values():
            raise HandshakeError(f"verdict {verdict}: unknown")
        return Verdict(verdict), generation

    def _meeting(self, said: bytes) -> authentication.Meeting:
        nonce = self.hello[-authentication.NONCE_BYTES :]
        context = b"native" + pack_greeting(self.protocol) + self.hello + said
        return authentication.Meeting(self.secret, context, nonce, self.nonce)
