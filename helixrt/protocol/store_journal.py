"""The journal of a run's store: from its lines the store is made again as it was when its process was killed.

In: operations on the store (`store_quorum`'s, without its pauses), in the order in which it carries them out; later the bytes
of the journal. Out: what each is answered with, and the change that it makes (`decide`); the line of a change; all values again
(`replay`). Pure: the store's process writes and reads the bytes, and so does the simulated world of the step protocol.

The rule: a change is in the journal before anybody is told of it. So whatever a client was answered stands after the store was
lost and made again; of what was not answered, each operation stands whole or not at all. A client that does not know asks
again: `PutIfAbsent` then gives its own value if that stood already, so the value must say who wrote it wherever only one may
win.

The bytes belong to the operating system before the answer, and not to the disk: a process that is killed loses nothing of them,
a machine that goes down may lose the newest. Therefore the journal names the run's life and the boot of the machine, and is
taken only where both are the same (`Refused`); nothing waits for a disk. Everything is in it, also what is set again and again,
so that no key needs a class of its own; a journal that has grown to `GROWTH` times the values is written anew (`is_due`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from zlib import crc32

from helixrt.protocol.store_quorum import Delete, Get, PutIfAbsent, Set

VERSION = 1
GROWTH, LEAST_BYTES = 4, 8 << 20  # of a journal that is written anew

Asked = Get | Set | PutIfAbsent | Delete


@dataclass(frozen=True)
class Identity:
    """Whose journal it is: the run, its life, and the boot of the machine ("" where a machine does not say)."""

    run: str
    life: int
    boot: str


@dataclass(frozen=True)
class Change:
    """`value` None: the key is gone."""

    key: str
    value: str | None


class Refused(ValueError):
    """This journal is not that of the store as it was; the message says why."""


def decide(values: Mapping[str, str], asked: Asked) -> tuple[str | None, Change | None]:
    """What the operation is answered with, and what it changes, if anything. `put_if_absent`: what the key has then."""
    now = values.get(asked.key)
    match asked:
        case Get():
            return now, None
        case PutIfAbsent():
            return (asked.value, Change(asked.key, asked.value)) if now is None else (now, None)
        case Set():
            return None, None if now == asked.value else Change(asked.key, asked.value)
        case Delete():
            return None, None if now is None else Change(asked.key, None)


def apply(values: dict[str, str], change: Change) -> None:
    if change.value is None:
        values.pop(change.key, None)
    else:
        values[change.key] = change.value


# ---------------------------------------------------------------- bytes


def first_line(identity: Identity) -> bytes:
    return _line({"version": VERSION, **asdict(identity)})


def line_of(change: Change) -> bytes:
    return _line([change.key] if change.value is None else [change.key, change.value])


def written_anew(identity: Identity, values: Mapping[str, str]) -> bytes:
    """A journal that has these values and nothing else."""
    return first_line(identity) + b"".join(line_of(Change(key, value)) for key, value in values.items())


def is_due(journal_bytes: int, anew_bytes: int) -> bool:
    """Whether to write the journal anew; `anew_bytes`: its length when that was last done."""
    return journal_bytes > max(LEAST_BYTES, GROWTH * anew_bytes)


def replay(data: bytes, identity: Identity) -> tuple[dict[str, str], int]:
    """The values, and how many bytes are whole lines: what follows is the line that was being written, and nobody was told of.

    Raises Refused for the journal of another run, life, boot or version, and for one that is damaged.
    """
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].split(b"\n")[:-1]
    if not lines:
        raise Refused("it is empty")
    _check_same(_content(lines[0], 1), identity)
    values: dict[str, str] = {}
    for number, line in enumerate(lines[1:], 2):
        match _content(line, number):
            case [str(key)]:
                values.pop(key, None)
            case [str(key), str(value)]:
                values[key] = value
            case _:
                raise Refused(f"line {number} is no change of a value")
    return values, whole


def _check_same(said: object, identity: Identity) -> None:
    if not isinstance(said, dict) or said.get("version") != VERSION:
        raise Refused(f"it is not of version {VERSION}: {said}")
    if (said.get("run"), said.get("life")) != (identity.run, identity.life):
        raise Refused(f"it belongs to life {said.get('life')} of run {said.get('run')}")
    if not identity.boot or said.get("boot") != identity.boot:
        raise Refused("it was written by another machine, or before this one was started again, and may lack its newest lines")


def _line(content: object) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32(text), text)


def _content(line: bytes, number: int) -> object:
    text = line[9:]
    if line[:9] != b"%08x " % crc32(text):
        raise Refused(f"line {number} is damaged")
    found: object = json.loads(text)
    return found
