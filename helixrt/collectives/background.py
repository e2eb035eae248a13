"""A communicator's own thread: it drives while no caller does, and ends with its communicator.

In: a weak reference to the communicator, so that a forgotten one is collected and its thread ends. Out: nothing. When it takes
a turn and how it sleeps is decided by `protocol/handoff.py`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from helixrt.collectives.system import System
from helixrt.protocol.handoff import AT_ONCE, Rest
from helixrt.transport import contract
from helixrt.transport.poller import Poller

if TYPE_CHECKING:
    from helixrt.collectives.communicator import Communicator

_log = logging.getLogger("helixrt.collectives")

JOIN_S = 10.0  # for the thread to end: turns are short, callbacks of users may not be


def run(reference: weakref.ref[Communicator], poller: Poller, stop: threading.Event) -> None:
    """What the thread does."""
    torch.set_grad_enabled(False)
    rest: Rest | None
    while not stop.is_set():
        communicator = reference()
        if communicator is None:
            break
        try:
            rest = communicator.background()
        except Exception:  # it ended the generation; callers have its cause
            _log.exception("%s", communicator.name)
            rest = AT_ONCE
        del communicator
        if rest is None:
            break
        if rest.apart:
            poller.sleep(rest.timeout_s)
        else:
            poller.wait(rest.timeout_s)
    communicator = reference()
    if communicator is None:
        poller.leave()
    else:
        communicator.background_ends()


def end(stop: threading.Event, poller: Poller, thread: threading.Thread | None, here: bool) -> bool:
    """Whether the thread has ended, so that no thread sleeps on the poller. `here`: the caller is that thread."""
    stop.set()
    if thread is None:
        return True
    poller.wake()
    if here:
        return False
    thread.join(JOIN_S)
    if thread.is_alive():  # it ends with what it runs, and needs what it sleeps on until then
        _log.error("%s: a callback takes more than %g s; what it belongs to is closed without it", thread.name, JOIN_S)
    return not thread.is_alive()


def abandon(
    stop: threading.Event, poller: Poller, thread: threading.Thread, endpoint: contract.Endpoint, system: System
) -> None:
    """A communicator is gone that was never closed, or closed while its thread ran a callback; or the program ends.

    The collector may call this in any thread, also in the communicator's own.
    """
    end(stop, poller, thread, system.is_current(thread))
    endpoint.close()
    poller.leave()
