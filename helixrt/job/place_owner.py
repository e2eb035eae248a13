"""Whose the checkpoints in a place outside the run's folder are: one folder's run at a time writes and deletes there.

In: the place (a storage, or another folder), the run's folder. Out: the file `owner.json` in the place, written at each begin
and resumption, with the folder and a token that `run.json` has, too. A folder that was copied names the same place; without
this the two runs would delete each other's checkpoints. The copy that is resumed beside the original is refused, and ranks
whose run does not own the place any more delete nothing there.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from helixrt.errors import ConfigError, Retryable
from helixrt.job.lineage_files import write_durably
from helixrt.job.stored_path import Place, StoredPath

FILE = "owner.json"


@dataclass(frozen=True)
class Owner:
    """Which folder's run has a place. `inode`: the folder's number in its file system, which stays when it is renamed."""

    run: str
    folder: str
    host: str
    inode: int
    token: str
    since_s: float  # Unix time

    @staticmethod
    def of(run: str, folder: Path) -> Owner:
        """This folder from now on, with a new token."""
        at = str(folder.resolve())
        return Owner(run, at, socket.gethostname(), os.stat(at).st_ino, secrets.token_hex(8), time.time())


def is_copy(owner: Owner, mine: Owner, there: bool) -> bool:
    """Whether the owner's folder may be another one than ours, which was made as a copy of it. `there`: the owner's folder is
    on this host still. A folder that was moved within this host, or that other hosts see at the same path, is the same."""
    here = owner.host == mine.host
    if owner.folder == mine.folder:
        return not here and owner.inode != mine.inode
    return not (here and (owner.inode == mine.inode or not there))


def owner_of(place: Place) -> Owner | None:
    """None without one, as in places of earlier versions. Raises OSError if a storage does not answer, ValueError for a file
    that is none."""
    try:
        text = (place / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return Owner(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"{place / FILE} does not say whose the place is: {error}") from error


def check_owner(place: Place, run: str, folder: Path) -> None:
    """Raises ConfigError (resume) if the checkpoints there are another folder's, or if that cannot be read. Changes nothing."""
    try:
        owner = owner_of(place)
    except (OSError, ValueError) as error:
        raise ConfigError("resume", folder, f"{place / FILE} cannot be read: {error}") from error
    if owner is None or not is_copy(owner, Owner.of(run, folder), (Path(owner.folder) / "run.json").is_file()):
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since_s))
    rule = (
        f"its checkpoints in {place} are those of the run in {owner.folder} on {owner.host} (since {since}), of which this "
        f"folder is a copy: two runs would delete each other's checkpoints. Resume {owner.folder}; or, if nobody will resume "
        f"that one any more, delete {place / FILE} and resume again"
    )
    raise ConfigError("resume", folder, rule)


def take(place: Place, run: str, folder: Path) -> str:
    """Make the run in this folder the owner; its token. Raises OSError."""
    owner = Owner.of(run, folder)
    text = json.dumps(asdict(owner))
    if isinstance(place, StoredPath):
        (place / FILE).write_bytes(text.encode())
    else:
        place.mkdir(parents=True, exist_ok=True)
        write_durably(place / FILE, text)
    return owner.token


def token_in(folder: Path) -> str:
    """The token of the run in this folder; "" where its checkpoints are in the folder itself. Raises Retryable if that cannot
    be read now."""
    try:
        return str(json.loads((folder / "run.json").read_text(encoding="utf-8")).get("owner", ""))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise Retryable(f"{folder / 'run.json'} cannot be read: {error}") from error


class DeletionGuard:
    """Whether this life of a run may delete checkpoints in its place: the owner is the one that it began with. `say` gets a
    line the first time that it is another."""

    def __init__(self, place: Place, token: str, say: Callable[[str], None]) -> None:
        self._place, self._token, self._say, self._said = place, token, say, False

    def __call__(self) -> bool:
        """Not while the storage does not say whose it is."""
        if not self._token:
            return True
        try:
            owner = owner_of(self._place)
        except (OSError, ValueError):
            return False
        if owner is not None and owner.token == self._token:
            return True
        if not self._said:
            self._said = True
            whose = "nobody's any more" if owner is None else f"those of the run in {owner.folder} on {owner.host} now"
            self._say(f"no checkpoints are deleted in {self._place}: they are {whose}")
        return False
