"""How two ends of a connection prove to each other that they know the run's secret.

In: the secret, a random nonce of each end, and the context: what both ends assume this connection to be
(transport, generation, ranks). Out: one proof per end. A proof is an HMAC over all of it and the end's
role, so it cannot be reflected, replayed on another connection, or used for another generation or rank;
the secret itself never travels. The dialling end proves itself first.

Pure but for the nonces; each driver moves the bytes its own way.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

NONCE_BYTES = 32
PROOF_BYTES = 32


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Meeting:
    """One connection, as both its ends must see it."""

    secret: bytes
    context: bytes
    dialler_nonce: bytes
    answerer_nonce: bytes

    def __post_init__(self) -> None:
        assert len(self.dialler_nonce) == len(self.answerer_nonce) == NONCE_BYTES

    def dialler_proof(self) -> bytes:
        return self._proof(b"dialler")

    def answerer_proof(self) -> bytes:
        return self._proof(b"answerer")

    def _proof(self, role: bytes) -> bytes:
        # Every part has a fixed length but the last: no two meetings give the same bytes.
        said = role.ljust(16, b"\0") + self.dialler_nonce + self.answerer_nonce + self.context
        return hmac.new(self.secret, b"helixrt link 1" + said, hashlib.sha256).digest()


def agrees(proof: bytes, expected: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(proof, expected)
