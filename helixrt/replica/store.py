"""The run's store over torch's TCPStore, and one in memory for a single process.

In: the `host:port` of a store that the driver hosts with `host_store`. Out: `RunStore`.

A TCPStore client serves one call at a time over one connection, and a blocking wait in one thread
would hold up every other, so each thread that uses a `TcpRunStore` has a client of its own. A client
whose connection broke is thrown away; the thread's next call connects anew.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from helixrt.collectives.rendezvous import STORE_CONNECT_S, store_client
from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.replica.contracts import RunStore

T = TypeVar("T")


def host_store(host: str = "127.0.0.1", port: int = 0) -> tuple[dist.TCPStore, str]:
    """Serve a store for as long as the first result lives; returns it and its `host:port`. Raises ConfigError as
    `listener_on`."""
    listener = listener_on(host, port)
    address = address_of(listener, host)
    return serve_store(listener.detach(), address), address


def serve_store(listening: int, address: str) -> dist.TCPStore:
    """Serve a store on a listening socket, given by its descriptor, for as long as the result lives.

    Left to itself TCPStore listens on every interface, whatever host it is given. Here it is handed a socket that is bound to
    one alone.
    """
    host, port = split_address(address)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)


def listener_on(host: str, port: int) -> socket.socket:
    """Port 0 takes any free one. Raises ConfigError (key `port`) when the port is in use or may not be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        rule = "is in use; choose another, or 0 for any free one" if in_use else f"cannot listen on {host}: {error}"
        raise ConfigError("port", port, rule) from error
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """`host:port`."""
    port = int(listener.getsockname()[1])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[host]:port` in two parts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


_NO_VALUE = "\0"


def check_value(key: str, value: str) -> None:
    """Raises ValueError for a value that no store has."""
    if value in ("", _NO_VALUE):
        raise ValueError(f"the value of {key!r} is empty; the store cannot tell that from no value")


class TcpRunStore(RunStore):
    """A client of the store at `address`; every thread connects when it first calls.

    `connect_timeout_s` bounds a connection attempt, `call_timeout_s` every call that does not say otherwise.
    """

    def __init__(self, address: str, connect_timeout_s: float = STORE_CONNECT_S, call_timeout_s: float = 10.0) -> None:
        self.address = address
        self._connect_timeout_s, self._call_timeout_s = connect_timeout_s, call_timeout_s
        self._local = threading.local()

    def put_if_absent(self, key: str, value: str) -> str:
        check_value(key, value)
        # compare_set against "" sets a key that is not there, and gives back what is there now.
        return self._call(lambda client: client.compare_set(key, "", value)).decode()

    def set(self, key: str, value: str) -> None:
        check_value(key, value)
        self._call(lambda client: client.set(key, value))

    def get(self, key: str) -> str | None:
        # One call, where `check` and `get` are two, between which another client may delete: to replace a value that no key
        # has changes nothing, and gives back what is there now, or that value if there is no such key.
        found = self._call(lambda client: client.compare_set(key, _NO_VALUE, _NO_VALUE)).decode()
        return None if found in ("", _NO_VALUE) else found

    def wait(self, key: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s

        def read(client: dist.TCPStore) -> str:
            found = ""
            while not found:  # torch's store also wakes who waits when another client has looked by `get`
                client.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                found = client.get(key).decode() if client.check([key]) else ""
            return found

        return self._call(read, f"no {key!r} in the run's store within {timeout_s:g} s")

    def delete(self, key: str) -> None:
        self._call(lambda client: client.delete_key(key))

    def _call(self, call: Callable[[dist.TCPStore], T], when_late: str = "") -> T:
        try:
            client = getattr(self._local, "client", None)
            if client is None:
                client = store_client(*split_address(self.address), self._connect_timeout_s)
                client.set_timeout(timedelta(seconds=self._call_timeout_s))
                self._local.client = client
            return call(client)
        except dist.DistError as error:
            # A wait that ran out leaves the connection sound; anything else does not.
            late = isinstance(error, dist.DistStoreError) and bool(when_late)
            if not late:
                self._local.client = None
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Retryable(
                Cause(when_late if late else f"the run's store at {self.address} cannot be reached: {reason}")
            ) from error


class MemoryRunStore(RunStore):
    """The store of a run that lives in one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def put_if_absent(self, key: str, value: str) -> str:
        check_value(key, value)
        with self._changed:
            now = self._values.setdefault(key, value)
            self._changed.notify_all()
            return now

    def set(self, key: str, value: str) -> None:
        check_value(key, value)
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> str | None:
        with self._changed:
            return self._values.get(key)

    def wait(self, key: str, timeout_s: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise Retryable(f"no {key!r} in the run's store within {timeout_s:g} s")
            return self._values[key]

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)
