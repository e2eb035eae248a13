"""What clients and server of a run's durable store say to each other.

A connection begins with the proof of both ends that they know the run's secret (`transport.authentication`), and the name of
the client: a client that comes again takes the place of its earlier connection, so that nothing of that is carried out later.
Then frames: a length of four bytes, and JSON. A request is `[NAME, KEY, …]`, an answer `[VALUE or null]`; each request of a
connection is answered before the next is read. A frame is at most `MOST_BYTES` long.
"""

from __future__ import annotations

import json
import struct

from helixrt.transport.authentication import NONCE_BYTES, PROOF_BYTES, Meeting

CONTEXT = b"helixrt store 1"
NAME_BYTES = 16
GREETING_BYTES = NONCE_BYTES  # of both ends, the client's first
CLIENT_PROOF_BYTES = PROOF_BYTES + NAME_BYTES
MOST_BYTES = 64 << 20
LENGTH = struct.Struct("!I")

PUT, SET, GET, DELETE, WAIT = "put", "set", "get", "delete", "wait"


def meeting(secret: str, client_nonce: bytes, server_nonce: bytes, name: bytes) -> Meeting:
    return Meeting(secret.encode(), CONTEXT + name, client_nonce, server_nonce)


def frame(content: list[object]) -> bytes:
    """Raises ValueError for more than a frame holds."""
    text = json.dumps(content, separators=(",", ":")).encode()
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes for the run's store are more than the {MOST_BYTES} that it takes at a time")
    return LENGTH.pack(len(text)) + text
