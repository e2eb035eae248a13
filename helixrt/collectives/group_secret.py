"""How the ranks of a group come to a secret through a store that anyone can read (Diffie-Hellman, group 14 of RFC 3526).

In: the public keys of all ranks, in their order. Out: what rank 0 publishes then, from which each rank, and nobody else, gets
the secret. Whoever can write to the store while the group forms can take part. Keys are of one group each.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

_PRIME = int(
    "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E3404DDEF9519B3CD3A431B302B0A6DF25F1437"
    "4FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF05"
    "98DA48361C55D39A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08CA18217C32905E462E36CE3B"
    "E39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF6955817183995497CEA956AE515D2261898FA051015728E5A8AACAA68FFFFFFFFFFFFFFFF",
    16,
)
_BYTES, _SECRET_BYTES = 256, 32


class GroupSecret:
    """Of one rank and one group. `public`: its public key."""

    def __init__(self) -> None:
        self._private = secrets.randbits(8 * _SECRET_BYTES)
        self._secret = secrets.token_bytes(_SECRET_BYTES)  # of the group, if this is rank 0
        self.public = pow(2, self._private, _PRIME).to_bytes(_BYTES, "big")

    def sealed(self, publics: Sequence[bytes]) -> list[bytes]:
        """By rank 0: for each rank what `opened` takes; the first entry is this rank's public key."""
        return [self.public, *(_xor(self._secret, self._pad(public)) for public in publics[1:])]

    def opened(self, rank: int, sealed: Sequence[bytes]) -> str:
        """The secret of the group."""
        return (self._secret if rank == 0 else _xor(sealed[rank], self._pad(sealed[0]))).hex()

    def _pad(self, public: bytes) -> bytes:
        shared = pow(int.from_bytes(public, "big"), self._private, _PRIME)
        return hashlib.sha256(shared.to_bytes(_BYTES, "big")).digest()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
