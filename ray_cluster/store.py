"""The run's store in the Ray cluster's own key-value store.

The only file that uses Ray's private `ray.experimental.internal_kv` (tried with 2.60). It lives in the
cluster's head, so it outlives the driver, though not the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from helixrt.errors import Cause, MissingExtra, Retryable
from helixrt.replica.contracts import RunStore

T = TypeVar("T")

_POLL_S = (0.001, 0.05)  # first and longest pause between two looks for a key


class RayRunStore(RunStore):
    """The store of the run `run`, apart from other runs' by Ray's key-value namespace.

    Needs a process that is connected to Ray. There is no push: `wait` looks again and again, at
    most 50 ms apart.
    """

    def __init__(self, run: str) -> None:
        try:
            from ray.experimental import internal_kv
        except ImportError as error:
            raise MissingExtra("ray", "ray", "the run's store in a Ray cluster") from error
        self._kv: Any = internal_kv
        self._namespace = f"helixrt/{run}".encode()

    def put_if_absent(self, key: str, value: str) -> str:
        if not value:
            raise ValueError(f"the value of {key!r} is empty; the store cannot tell that from no value")
        while True:
            self._call(
                lambda: self._kv._internal_kv_put(key.encode(), value.encode(), overwrite=False, namespace=self._namespace)
            )
            # Read even after a put that seems to have won: Ray may have repeated it by itself.
            stands = self.get(key)
            if stands is not None:  # else another client deleted it in between
                return stands

    def set(self, key: str, value: str) -> None:
        if not value:
            raise ValueError(f"the value of {key!r} is empty; the store cannot tell that from no value")
        self._call(lambda: self._kv._internal_kv_put(key.encode(), value.encode(), overwrite=True, namespace=self._namespace))

    def get(self, key: str) -> str | None:
        value = self._call(lambda: self._kv._internal_kv_get(key.encode(), namespace=self._namespace))
        return None if value is None else value.decode()

    def wait(self, key: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        pause_s, longest_s = _POLL_S
        while (value := self.get(key)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Retryable(f"no {key!r} in the run's store within {timeout_s:g} s")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, longest_s)
        return value

    def delete(self, key: str) -> None:
        self._call(lambda: self._kv._internal_kv_del(key.encode(), namespace=self._namespace))

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # Ray raises what its transport raised, of no common class
            raise Retryable(Cause(f"Ray's key-value store cannot be reached: {error or type(error).__name__}")) from error
