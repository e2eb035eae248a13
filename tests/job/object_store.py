"""A storage for fsspec as object stores are: whole objects appear when they are closed, and nothing can be renamed or linked.

In: addresses `objects:///absolute/path`; the objects are files there, so that several processes see the same. Imported for its
side effect: fsspec knows the protocol afterwards.
"""

from __future__ import annotations

import io
import os
import secrets
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "objects"


class _Object(io.BytesIO):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            part = f"{os.path.dirname(self._path)}/.{secrets.token_hex(4)}"
            os.makedirs(os.path.dirname(part), exist_ok=True)
            with open(part, "wb") as file:
                file.write(self.getvalue())
            os.replace(part, self._path)
        super().close()


class ObjectStore(LocalFileSystem):
    """`broken`: why nothing works now, "" if all does."""

    protocol = PROTOCOL
    broken = ""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("objects://")))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.broken:
            raise RuntimeError(self.broken)  # packages of storages have errors of their own
        return _Object(path) if "w" in mode else super()._open(path, mode, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if self.broken:
            raise RuntimeError(self.broken)
        found = super().ls(path, detail=True, **options)
        found = [each for each in found if not os.path.basename(each["name"]).startswith(".") or "metadata" in each["name"]]
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **options: Any) -> Any:
        if self.broken:
            raise RuntimeError(self.broken)
        return super().info(path, **options)

    def mv(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError("an object store does not rename")

    mv_file = rename = link = symlink = mv


fsspec.register_implementation(PROTOCOL, ObjectStore, clobber=True)
