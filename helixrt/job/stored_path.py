"""A place in a storage that fsspec reaches (s3://, gs://, abfs:// and others), with the methods of `pathlib.Path` that
checkpoints need.

In: an address. Out: `StoredPath`; `place_of` gives a `Path` where the address is that of a folder. An object appears whole when
its file is closed; nothing is renamed or linked, which most storages cannot do in one step. What goes wrong is an OSError,
whatever the storage's package raises.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError
from helixrt.job.storage_trouble import in_words

_LOCAL = ("file", "local")


@dataclass(frozen=True, order=True)
class StoredPath:
    """`url` has a protocol, and no slash at its end. Every method may raise OSError."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> StoredPath:
        return StoredPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]

    def outermost(self) -> StoredPath:
        """The bucket, or the first folder."""
        protocol, _, rest = self.url.partition("://")
        root = "/" if rest.startswith("/") else ""
        return StoredPath(f"{protocol}://{root}{rest.strip('/').partition('/')[0]}")

    def exists(self) -> bool:
        return self._kind() != ""

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there is anything below."""
        return self._kind() == "directory"

    def _kind(self) -> str:
        """As the storage says; "" if there is nothing. fsspec's own `exists` takes a silent storage for an empty one."""
        with self._storage() as (storage, at):
            try:
                return str(storage.info(at)["type"])
            except (FileNotFoundError, NotADirectoryError):
                return ""

    def size(self) -> int:
        """Of a file, in bytes."""
        with self._storage() as (storage, at):
            return int(storage.info(at)["size"])

    def iterdir(self) -> Iterator[StoredPath]:
        with self._storage() as (storage, at):
            found = storage.ls(at, detail=False)
        names = {str(each).rstrip("/").rsplit("/", 1)[1] for each in found}
        return (self / name for name in sorted(names - {self.name} if str(at) in found else names))

    def blocks(self, nbytes: int) -> Iterator[bytes]:
        """The bytes, so many at a time."""
        with self._storage() as (storage, at), storage.open(at, "rb") as file:
            while block := file.read(nbytes):
                yield block

    def read_bytes(self) -> bytes:
        with self._storage() as (storage, at), storage.open(at, "rb") as file:
            return bytes(file.read())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        with self._storage() as (storage, at):
            storage.makedirs(at.rpartition("/")[0], exist_ok=True)
            storage.pipe_file(at, data)

    def unlink(self, missing_ok: bool = False) -> None:
        with self._storage() as (storage, at):
            try:
                storage.rm_file(at)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def delete_below(self) -> None:
        """Everything below, as far as that goes."""
        with suppress(OSError), self._storage() as (storage, at):
            storage.rm(at, recursive=True)

    @contextmanager
    def _storage(self) -> Iterator[tuple[Any, str]]:
        """The storage, and where this is in it, with nothing remembered of what was there before."""
        from fsspec.core import url_to_fs

        try:
            storage, at = url_to_fs(self.url)
            storage.invalidate_cache()
            yield storage, at
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error


Place = Path | StoredPath  # of checkpoints


def place_of(address: str | Path) -> Place:
    """What this address names: a folder, or a place in a storage."""
    protocol, mark, rest = str(address).partition("://")
    if not mark:
        return Path(address)
    return Path(rest) if protocol in _LOCAL else StoredPath(str(address).rstrip("/"))


def place_in(address: str, name: str) -> Place:
    """What has this name there, where it does not depend on the working directory."""
    place = place_of(address)
    return (place.resolve() if isinstance(place, Path) else place) / name


def delete_all(place: Place) -> None:
    """Everything in it, as far as that goes."""
    if isinstance(place, StoredPath):
        place.delete_below()
    else:
        shutil.rmtree(place, ignore_errors=True)


def check_storage(key: str, address: str) -> None:
    """Raises ConfigError (`key`) for an address that ranks in processes of their own cannot use. Asks no storage."""
    protocol, mark, rest = address.partition("://")
    if not mark or protocol in _LOCAL:
        return
    if "::" in address:
        raise ConfigError(key, address, "must be one storage: addresses that are chained with :: are not supported")
    if protocol == "memory":
        raise ConfigError(key, address, "must be a storage that all ranks share; memory:// is of one process")
    if not rest.strip("/"):
        raise ConfigError(key, address, f"must name a place, such as {protocol}://BUCKET/FOLDER")
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(key, address, f"cannot be reached: {error}") from error


def check_writable(key: str, place: Place) -> None:
    """Put an object there and delete it. Raises ConfigError (`key`) if that fails, or if the bucket is not there, which some
    storages would make."""
    if not isinstance(place, StoredPath):
        return
    with suppress(OSError):  # those who may write need not be allowed to ask
        if not place.outermost().exists():
            raise ConfigError(key, place, f"{place.outermost()} is not there")
    probe = place / f".writable-{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(key, place, f"cannot be written: {in_words(error)}") from error
