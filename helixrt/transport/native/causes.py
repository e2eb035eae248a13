"""The reason of an end as text, as it travels in an ABORT frame and comes back in an event of the engine.

In: a `Cause`. Out: a line of JSON that fits an event (`CAUSE_BYTES`), with its longest part cut if need be.
"""

from __future__ import annotations

import json

from helixrt.errors import Cause

CAUSE_BYTES = 1000  # an event of the engine holds 1,023 bytes of text
_PLACE_BYTES = 200  # of the rank, and of the log's place
_ESCAPED = 6  # bytes that one byte takes at most in JSON


def pack_cause(cause: Cause) -> str:
    """At most `CAUSE_BYTES` of UTF-8."""
    said = {"what": cause.what, "rank": _cut(cause.rank, _PLACE_BYTES), "log": _cut(cause.log, _PLACE_BYTES)}
    over = _bytes_of(said) - CAUSE_BYTES
    if over > 0:
        said["what"] = _cut(cause.what, max(0, len(cause.what.encode(errors="replace")) - over))
    if _bytes_of(said) > CAUSE_BYTES:  # much of it is escaped
        said = {key: _cut(text, (CAUSE_BYTES - 100) // len(said) // _ESCAPED) for key, text in said.items()}
    return _text(said)


def parse_cause(text: str) -> Cause | None:
    """None if the text is no packed cause: then it is the engine's own reason."""
    if not text.startswith("{"):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.keys() != {"what", "rank", "log"}:
        return None
    if not all(isinstance(each, str) for each in said.values()):
        return None
    return Cause(said["what"], said["rank"], said["log"])


def _text(said: dict[str, str]) -> str:
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode(errors="replace").decode()


def _bytes_of(said: dict[str, str]) -> int:
    return len(_text(said).encode())


def _cut(text: str, size: int) -> str:
    return text.encode(errors="replace")[:size].decode(errors="ignore")
