"""Maps work completions and asynchronous events to the failure classes of the link machine.

In: a completion's status, an event's type (the library's numbers). Out: `Failure` and a reason. Pure. SHIFT section 4.3
leaves it at "an error completion"; which one it is decides where and when the rail is tried again.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

from helixrt.protocol.link.messages import Failure
from helixrt.transport.verbs.library import Enums

_BY_STATUS: Mapping[str, Failure] = {
    # Our own device: down, reset, or it lost a registration. Every address is checked before it is posted, so a
    # protection error is the device's too, and another device has registrations of its own.
    "LOC_QP_OP_ERR": Failure.DEVICE,
    "LOC_EEC_OP_ERR": Failure.DEVICE,
    "LOC_PROT_ERR": Failure.DEVICE,
    "MW_BIND_ERR": Failure.DEVICE,
    "LOC_ACCESS_ERR": Failure.DEVICE,
    "LOC_RDD_VIOL_ERR": Failure.DEVICE,
    "INV_EECN_ERR": Failure.DEVICE,
    "INV_EEC_STATE_ERR": Failure.DEVICE,
    "FATAL_ERR": Failure.DEVICE,
    "GENERAL_ERR": Failure.DEVICE,
    # No answer, or the other end's device failed while it answered.
    "RETRY_EXC_ERR": Failure.PATH,
    "RNR_RETRY_EXC_ERR": Failure.PATH,
    "RESP_TIMEOUT_ERR": Failure.PATH,
    "REM_OP_ERR": Failure.PATH,
    "REM_ABORT_ERR": Failure.PATH,
    "BAD_RESP_ERR": Failure.PATH,
    # Said of a request the other end cannot take. What is posted is checked to fit its memory, so what it could not take
    # was garbled: Soft-RoCE answers so to packets that come again because their answers were late.
    "REM_INV_REQ_ERR": Failure.PATH,
    # A consequence of one that came before.
    "WR_FLUSH_ERR": Failure.CASCADE,
    # The other end refuses: a key, an address or a length that was never agreed. It would be refused anywhere.
    "LOC_LEN_ERR": Failure.PROGRAM,  # what came is longer than any message can be
    "REM_ACCESS_ERR": Failure.PROGRAM,
    "REM_INV_RD_REQ_ERR": Failure.PROGRAM,
}


def first_cause(statuses: Iterable[int], enums: Enums) -> tuple[Failure, str]:
    """Of failed completions in the order they came: the first that is no consequence of another."""
    first: tuple[Failure, str] | None = None
    for status in statuses:
        name = enums.statuses.get(status, f"status {status}")
        failure = _BY_STATUS.get(name, Failure.DEVICE)
        if failure is not Failure.CASCADE:
            return failure, f"work completion {name}"
        first = first or (failure, f"work completion {name}")
    assert first is not None
    return first


def nobody_answered(error: Exception) -> bool:
    """Whether a queue pair could not be connected because the kernel looked for the peer's hardware address in vain."""
    code = getattr(error, "error_code", errno.ETIMEDOUT)  # from pyverbs; without it a timeout is assumed
    return code in (errno.ETIMEDOUT, errno.EHOSTUNREACH)


def port_failed(event: int, enums: Enums) -> str | None:
    """Why nothing goes through the port any more; None if the event is another one."""
    if event == enums.EVENT_PORT_ERR:
        return "asynchronous event PORT_ERR"
    return "asynchronous event DEVICE_FATAL" if event == enums.EVENT_DEVICE_FATAL else None
