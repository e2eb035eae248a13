"""The lock of a run's folder: one process at a time drives the run, and so writes there.

In: the folder. Out: a lock that this process holds until it is closed, or until the process has ended, in whatever way: a lock
of the operating system on the file `run.lock`, which says who holds it. It works between hosts where the file system has locks
for all of them (NFS 4, Lustre mounted with `flock`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.replica.telling import tell

FILE = "run.lock"
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NONE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """Of the folder of the run called `name`, in its life `life`, on its file `file`. Raises ConfigError (resume) if another
    process holds it, with that process. On a file system without locks it says so on standard error, and guards nothing."""

    def __init__(self, folder: Path, name: str, life: int, file: str = FILE) -> None:
        self._descriptor = os.open(folder / file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                holder = _holder(self._descriptor)
                self.close()
                rule = f"is written by {holder}; one process drives a run: wait for its end, or stop it"
                raise ConfigError("resume", folder, rule) from error
            if error.errno not in _NONE:
                self.close()
                raise
            tell(f"{folder}: its file system has no locks, so a second driver of this run is not noticed")
        text = {"host": socket.gethostname(), "pid": os.getpid(), "since_s": time.time(), "run": name, "life": life}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(text).encode(), 0)

    def close(self) -> None:
        """Give it up; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()


def is_locked(file: Path) -> bool:
    """Whether a living process holds the lock on this file; True on a file system without locks, which cannot tell."""
    return lock_on(file) is not False


def lock_on(file: Path) -> bool | None:
    """As `is_locked`; None on a file system without locks."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (*_TAKEN, *_NONE):
            raise
        return True if error.errno in _TAKEN else None
    finally:
        os.close(descriptor)
    return False


def _holder(descriptor: int) -> str:
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(said["since_s"])))
        return f"process {said['pid']} on {said['host']} since {since} (run {said['run']}, life {said['life']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
