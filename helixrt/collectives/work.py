"""What `torch.distributed` gets for an operation: a `Work` with the tensors that hold its result.

In: a communicator's handle. Out: `wait`, futures, errors. Torch's callers expect RuntimeErrors, with the phrases
that torchft's users and tests look for; the error stays a `Retryable` with its cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from helixrt.collectives.handle import CollectiveError, End, Handle
from helixrt.errors import Cause, Retryable

_PHRASES = {
    End.PEER: "Connection closed by peer",
    End.DEADLINE: "timed out after {timeout_ms} ms",
    End.ABORTED: "aborted",
    None: "process group not initialized",
}


class GroupError(Retryable, dist.DistBackendError):
    """The generation ended without the result; `configure` begins the next one."""


def group_error(error: CollectiveError, timeout_s: float) -> GroupError:
    phrase = _PHRASES[error.end].format(timeout_ms=round(1000 * timeout_s))
    cause = error.cause
    return GroupError(Cause(f"{phrase}: {cause.what}", cause.rank, cause.log))


class HelixWork(dist.Work):
    """One collective. The waiter drives it; nothing is copied on the way."""

    def __init__(self, handles: Sequence[Handle], tensors: list[torch.Tensor], timeout_s: float) -> None:
        super().__init__()
        self._handles, self._tensors, self._timeout_s = handles, tensors, timeout_s
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit_s = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
        try:
            for handle in self._handles:
                if not handle.wait(limit_s):
                    raise GroupError(f"timed out after {round(1000 * (limit_s or 0))} ms of waiting; the operation goes on")
        except CollectiveError as error:
            for handle in self._handles:  # the others ended with it
                handle.join()
            raise group_error(error, self._timeout_s) from None
        return True

    def is_completed(self) -> bool:
        return all(handle.done for handle in self._handles)

    def is_success(self) -> bool:
        return self.is_completed() and self._failure() is None

    def exception(self) -> GroupError | None:
        failure = self._failure()
        return None if failure is None else group_error(failure, self._timeout_s)

    def _failure(self) -> CollectiveError | None:
        return next((handle.error for handle in self._handles if handle.error is not None), None)

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """A future of the list of tensors. The error of a failed one comes out of `value` and `wait`.

        DDP's C++ side takes neither a future with `set_exception` nor one that was set from here directly: it is given
        what follows such a one (torch 2.13).
        """
        if self._future is None:
            devices = sorted({tensor.device for tensor in self._tensors if tensor.is_cuda}, key=str)
            first: Any = torch.futures.Future(devices=[*devices])
            waiting = [len(self._handles)]

            def count() -> None:
                waiting[0] -= 1
                if waiting[0]:
                    return
                error = self.exception()
                with contextlib.ExitStack() as streams:  # of their own: this thread's may have other work
                    for device in devices:
                        streams.enter_context(torch.cuda.stream(_stream_of(device)))
                    for handle in self._handles:  # the future brings its waiters' streams behind these
                        handle.join()
                    if error is None:
                        first.set_result(self._tensors)
                        return
                    for device in devices:  # an error brings no streams behind it: late sums end here
                        torch.cuda.current_stream(device).synchronize()
                first.set_exception(error)

            self._future = first.then(lambda f: f.value())
            for handle in self._handles:
                handle.then(count)
        return self._future


@lru_cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all futures: torch has 32 of a device, and gives them again in turn."""
    return torch.cuda.Stream(device)
