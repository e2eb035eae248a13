"""A durable store that can be lost and made again, in this process: the listening socket stays, as the keeper keeps it."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from pathlib import Path

from helixrt.protocol.store_journal import Identity
from helixrt.replica.store import address_of, listener_on
from helixrt.replica.store_client import DurableRunStore
from helixrt.replica.store_file import StoreFile
from helixrt.replica.store_server import StoreServer

ME = Identity("run", 0, "boot")
SECRET = "the run's secret"


class Served(AbstractContextManager["Served"]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.listener: socket.socket = listener_on("127.0.0.1", 0)
        self.address = address_of(self.listener, "127.0.0.1")
        self.server = self._serve()

    def _serve(self) -> StoreServer:
        return StoreServer(self.listener.dup(), SECRET, StoreFile(self.folder, ME))

    def client(self, patience_s: float = 60.0) -> DurableRunStore:
        return DurableRunStore(self.address, SECRET, patience_s)

    def lose(self) -> None:
        """As if its process were killed: what it has not sent is lost, and what is not in its file."""
        self.server.close()

    def make_again(self) -> None:
        self.server = self._serve()

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.listener.close()
