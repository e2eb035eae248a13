"""Native stacks in the log of a process that ends in native code; the private part of torch (2.13) that this needs.

`torch._C._set_print_stack_traces_on_fatal_signal`: on SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT the process writes the native
stack of each of its threads to standard error. Then the handler that was there before is called. The other threads are asked by
SIGUSR2; each has 2 s to answer.

The handler allocates memory. Where the signal comes from inside the allocator, as after a heap was overwritten, it may wait for
the allocator's lock forever: the rank then hangs, and is ended as one that hangs. So it is on only if the user asks for it.
"""

from __future__ import annotations

import os
import signal
import threading

from helixrt.private_api import NATIVE_STACKS, usable

VARIABLE = "HELIXRT_NATIVE_STACKS"  # "1": write native stacks


def tell_native_stacks() -> None:
    """If the user has asked for them, write native stacks at an end in native code from now on. To be called in the main thread
    (elsewhere it does nothing), before `telling.tell_native_ends`: the newest handler is called first, and Python's allocates
    nothing."""
    if os.environ.get(VARIABLE) != "1" or threading.current_thread() is not threading.main_thread():
        return
    if usable(NATIVE_STACKS):
        import torch

        torch._C._set_print_stack_traces_on_fatal_signal(True)
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))  # torch takes Ctrl-C for a fatal signal as well
