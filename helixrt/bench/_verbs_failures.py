"""Time until a verbs link detects a failed NIC, continues over the backup, and returns, in the lab.

In: the NIC pair to break. Out: per kind of failure, in milliseconds,

    noticed     from the moment at which the failure is there to the first completion with an error, or event of the port or
                of its network interface, that either end takes
    told        of that, the time until the kernel reports it: the first of those events, or the queue pair's error
    switched    from noticing to the first completion on the backup: SHIFT's downtime (section 5.2.1)
    moving      from noticing to the first chunk of data that lands over the backup
    back        from just before the NIC is repaired, with its routes, to the default rail in service again at both ends

Either end is a process of its own, and a third process breaks the NIC. A NIC is down when the kernel closes its device, and a
blackhole is there when the first packet is lost (`helixrt.lab.kernel_calls`). To take a NIC down keeps a processor busy in
the kernel for a while, which a NIC that fails does not: so it is done where the ends leave one free.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from helixrt.bench._verbs_end import RECEIVER, SENDER, Ends, Report, Stream
from helixrt.lab.kernel_calls import KernelCalls
from helixrt.lab.nics import NicPair
from helixrt.transport.verbs.queue_pair import Patience, Sizes

PATIENCE = Patience(timeout=12, retries=2)
CALLS = {"down": ("veth_close",), "blackhole": ("noop_enqueue", "netem_enqueue")}  # the failure, whichever is first
# The kernel's calls that report a failure: messages about links, then the port's event; or the queue pair's error.
TELLS = {
    "down": (("rtmsg_ifinfo", "nlmsg_notify"), ("ib_uverbs_event_handler",)),
    "blackhole": (("rxe_qp_error",),),
}
FIGURES = ("noticed_ms", "told_ms", "switched_ms", "moving_ms", "back_ms", "call_ms")
SWITCH_S, MOST_REPEATS = 5.0, 6  # an emulated machine may starve the backup too: then the link goes on over TCP
STEADY_S = 0.3  # of the stream before it is broken
BREAK: dict[str, tuple[str, Callable[[NicPair], float]]] = {
    "local down": ("down", lambda pair: pair.down("a")),
    "remote down": ("down", lambda pair: pair.down("b")),
    "blackhole": ("blackhole", lambda pair: pair.blackhole()),
}


def measure(pair: NicPair, devices: Sequence[Sequence[str]], sizes: Sizes, times: int) -> dict[str, dict[str, list[float]]]:
    """`devices` of either end, the default first: that of `pair`."""
    figures: dict[str, dict[str, list[float]]] = {}
    repeats = 0
    functions = {*itertools.chain(*CALLS.values()), *itertools.chain(*itertools.chain(*TELLS.values()))}
    ends, calls = Ends(), KernelCalls(sorted(functions))
    try:
        for how in BREAK:
            figures[how] = {key: [] for key in FIGURES}
            while len(figures[how]["back_ms"]) < times:
                found = _once(ends, calls, pair, how, devices, sizes)
                if found is None:
                    repeats += 1
                    if repeats > MOST_REPEATS:
                        raise RuntimeError(f"the backup failed as well, {repeats} times: too busy a machine for {PATIENCE}")
                    continue
                for key, value in found.items():
                    figures[how][key].append(round(1e3 * value, 3))
            print(f"  {how:12} " + ", ".join(f"{key[:-3]} {_span(values)}" for key, values in figures[how].items()) + " ms")
    finally:
        calls.close()
        ends.close()
        pair.heal()
    return figures


def _once(
    ends: Ends, calls: KernelCalls, pair: NicPair, how: str, devices: Sequence[Sequence[str]], sizes: Sizes
) -> dict[str, float] | None:
    """In seconds; None: the link went on over TCP, because the backup did not answer in time either."""
    pair.heal()
    ends.open(devices, sizes, PATIENCE)
    ends.ask(Stream(under_way=2))
    time.sleep(STEADY_S)
    kind, break_it = BREAK[how]
    calls.clear()
    ends.ask("clear")
    with _giving_way() if kind == "down" else contextlib.nullcontext():
        asked = break_it(pair)
    returned = time.monotonic()
    time.sleep(STEADY_S)  # no requests while the link switches
    switched = ends.wait_until(lambda: _moves_on(ends.reports(), devices), SWITCH_S)
    at = _first(calls, [(function,) for function in CALLS[kind]], asked)
    mended = pair.heal()
    if not ends.wait_until(lambda: all(report.turns and report.turns[-1][1] for report in ends.reports())):
        raise TimeoutError("the link did not come back")
    reports = ends.reports()
    ends.shut()
    if not switched:
        return None
    told = None if at is None else _first(calls, TELLS[kind], at)
    if at is None or told is None:
        raise RuntimeError(f"the kernel did not call {CALLS[kind]} and {TELLS[kind]}")
    first = min(when for report in reports for when, _ in report.seen.failed if when >= at)
    return {
        "noticed_ms": first - at,
        "told_ms": told - at,
        "switched_ms": min(w for report in reports for w, device in report.seen.sent if w > first and _backup(device, devices))
        - first,
        "moving_ms": _first_chunk(reports[RECEIVER], devices, first) - first,
        "back_ms": max(report.turns[-1][0] for report in reports) - mended,
        "call_ms": returned - asked,
    }


def _first(calls: KernelCalls, ways: Sequence[Sequence[str]], since: float) -> float | None:
    """When the first of these ways had been gone to its end."""
    ends = []
    for way in ways:
        at: float | None = since
        for function in way:
            at = None if at is None else calls.first(function, at)
        ends.append(at)
    return min((at for at in ends if at is not None), default=None)


@contextlib.contextmanager
def _giving_way() -> Iterator[None]:
    """Give the processor to any other process that can run."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _backup(device: str, devices: Sequence[Sequence[str]]) -> bool:
    return any(device in each[1:] for each in devices)


def _first_chunk(receiver: Report, devices: Sequence[Sequence[str]], since: float) -> float:
    return min(when for when, device, _ in receiver.seen.chunks if when > since and device in devices[RECEIVER][1:])


def _moves_on(reports: Sequence[Any], devices: Sequence[Sequence[str]]) -> bool:
    """Both ends have left the default rail, and data comes over the backup."""
    left = all(report.turns and not report.turns[-1][1] for report in reports)
    sent = any(_backup(device, devices) for _, device in reports[SENDER].seen.sent)
    return left and sent and any(_backup(device, devices) for _, device, _ in reports[RECEIVER].seen.chunks)


def _span(values: Sequence[float]) -> str:
    middle = sorted(values)[len(values) // 2]
    return f"{min(values):.1f} to {max(values):.1f} (half under {middle:.1f})"
