"""How two ends of a TCP connection prove the run's secret to each other before a frame goes over it.

    connector                                listener
    Hello (who, what for, a nonce)    ->
                                      <-     a nonce of its own
    proof over all of that            ->
                                      <-     verdict, its generation, and its proof over all of that

The proofs are `authentication`'s; their context is the whole Hello, and the verdict in the listener's. The connector
proves first: an unauthenticated process receives only a nonce. What follows on the connection is not encrypted, as Gloo's and
NCCL's is not.

In and out: bytes of fixed sizes, packed and unpacked here; sockets are `admission`'s.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from helixrt.transport import authentication

_MAGIC = b"HLXT\x01"  # protocol and version
_HELLO = struct.Struct("<5sBHQIIQ32s")
_CHALLENGE = struct.Struct("<5s32s")
_SAID = struct.Struct("<BQ")
HELLO_BYTES, CHALLENGE_BYTES = _HELLO.size, _CHALLENGE.size
PROOF_BYTES = authentication.PROOF_BYTES
VERDICT_BYTES = _SAID.size + PROOF_BYTES


class Purpose(IntEnum):
    """What a connection is for."""

    RAIL = 1  # frames of a link
    CONTROL = 2  # the reason of an end, which must not queue behind data
    PROBE = 3  # liveness probe in this generation: closed after the verdict


class Verdict(IntEnum):
    """The listener's answer to a connector that proved the secret."""

    WELCOME = 0
    STALE = 1  # the listener is in a newer generation
    ENDED = 2  # its link to the connector is over in this generation
    UNKNOWN = 3  # this generation has no such rank or rail here


class HandshakeError(Exception):
    """What came is not what a peer with the secret sends."""


@dataclass(frozen=True, slots=True)
class Hello:
    purpose: Purpose
    generation: int
    sender: int  # ranks in that generation
    receiver: int
    rail: int
    incarnation: int  # the how-manieth connection of this rail it is to be
    nonce: bytes

    def pack(self) -> bytes:
        fields = (self.purpose, self.rail, self.generation, self.sender, self.receiver, self.incarnation, self.nonce)
        return _HELLO.pack(_MAGIC, *fields)


def parse_hello(raw: bytes) -> Hello:
    magic, purpose, rail, generation, sender, receiver, incarnation, nonce = _HELLO.unpack(raw)
    if magic != _MAGIC or purpose not in Purpose.__members__.values():
        raise HandshakeError("no greeting of this protocol")
    return Hello(Purpose(purpose), generation, sender, receiver, rail, incarnation, nonce)


def pack_challenge(nonce: bytes) -> bytes:
    return _CHALLENGE.pack(_MAGIC, nonce)


def parse_challenge(raw: bytes) -> bytes:
    """The listener's nonce."""
    magic, nonce = _CHALLENGE.unpack(raw)
    if magic != _MAGIC:
        raise HandshakeError("no answer of this protocol")
    return bytes(nonce)


@dataclass(frozen=True, slots=True)
class Proofs:
    """Makes and checks the proofs of one connection. `hello`: its first bytes."""

    secret: bytes
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
        return authentication.Meeting(self.secret, b"tcp" + self.hello + said, nonce, self.nonce)
