"""Reads of a peer's memory and atomic operations on it, beside the messages of a link.

In: a `Window` the peer exposed (it travels in a message of the caller's), what to do in it. Out: a `OneSided`, which is
done some time later. These bypass the link machine, since the peer's software takes no part in them: no code counts what was
received. So SHIFT's check (section 4.3.2) decides alone: a read whose rail fails is done again on the next one, since
reading twice gives the same; an atomic operation that was posted may have taken effect, is never posted again, and raises.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from helixrt.errors import Cause, Retryable
from helixrt.transport.contract import Buffer

_WINDOW = struct.Struct("<4sQQB")
_KEY = struct.Struct("<I")
_MAGIC = b"HLXW"
WORD_BYTES = 8  # of an atomic operation, aligned


@dataclass(frozen=True, slots=True)
class Window:
    """Memory of a rank, as its peers name it: one key per rail."""

    address: int
    length: int
    keys: tuple[int, ...]

    def pack(self) -> bytes:
        return _WINDOW.pack(_MAGIC, self.address, self.length, len(self.keys)) + b"".join(map(_KEY.pack, self.keys))


def parse_window(raw: bytes) -> Window:
    """Raises ValueError."""
    if len(raw) < _WINDOW.size:
        raise ValueError("no window: too short")
    magic, address, length, count = _WINDOW.unpack_from(raw)
    if magic != _MAGIC or not count or len(raw) != _WINDOW.size + count * _KEY.size:
        raise ValueError("no window")
    return Window(address, length, tuple(key for (key,) in _KEY.iter_unpack(raw[_WINDOW.size :])))


class Action(Enum):
    READ = "read"
    FETCH_ADD = "fetch and add"
    COMPARE_SWAP = "compare and swap"


class OneSided:
    """One operation under way. `result()` when it is `done`."""

    def __init__(
        self, action: Action, window: Window, offset: int, into: Buffer | None = None, operand: int = 0, swap: int = 0
    ) -> None:
        length = WORD_BYTES if into is None else len(into)
        if not 0 <= offset <= window.length - length:
            raise ValueError(f"{length} bytes at {offset} of a window of {window.length} bytes")
        if action is not Action.READ and (window.address + offset) % WORD_BYTES:
            raise ValueError(f"{action.value} at {window.address + offset:#x}: must be aligned to {WORD_BYTES} bytes")
        if into is not None and into.readonly:
            raise ValueError("a read needs memory that may be written")
        self.action, self.window, self.offset, self.into = action, window, offset, into
        self.operand, self.swap = operand, swap
        self.done = False
        self._before = 0
        self._cause: Cause | None = None

    @property
    def repeatable(self) -> bool:
        return self.action is Action.READ

    def result(self) -> int:
        """What an atomic operation found there; a read fills its memory, and gives 0. Raises Retryable if it failed:
        an atomic operation may then have taken effect or not."""
        if not self.done:
            raise ValueError(f"the {self.action.value} is not done")
        if self._cause is not None:
            raise Retryable(self._cause)
        return self._before

    def finish(self, before: int = 0) -> None:
        self.done, self._before = True, before

    def fail(self, cause: Cause) -> None:
        self.done, self._cause = True, cause


def after_failure(posted: Sequence[OneSided], waiting: Sequence[OneSided], reason: str) -> list[OneSided]:
    """A rail failed with these: what is to be asked again on the next one. The others have failed now."""
    again = []
    for each in posted:
        if each.repeatable:
            again.append(each)
        else:
            each.fail(Cause(f"a {each.action.value} was under way, and may have taken effect: {reason}"))
    return [*again, *waiting]
