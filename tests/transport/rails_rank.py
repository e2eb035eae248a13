"""A program for a host of `helixrt.lab.net`: sends numbered messages to the other host and takes theirs, over all its rails.

Speaks with the test in lines of JSON: says its address, hears {"me", "peer", "messages", "size", "held"} (so many of the
messages are sent only after the line "more"; none if it is left out), says every tenth message
that came, {"done": counters} when all have come and gone, then waits for "end" on a line, sending now and then so that
rails have something to carry.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time

from helixrt.protocol.link.options import LinkOptions
from helixrt.transport.contract import Received, Sent
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.rails import rail_on

AT_ONCE = 4


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def content(sender: int, number: int, size: int) -> bytes:
    return random.Random(f"{sender} {number}").randbytes(size)


def main() -> None:
    rails = [rail_on(name) for name in os.environ["HELIXRT_RAILS"].split(",")]
    options = TcpOptions(period_s=0.5, link=LinkOptions(rest_s=0.05, retry_s=0.1), restore_s=0.5)
    endpoint = TcpEndpoint(b"of the lab", rails, options)
    say(address=endpoint.address().decode())
    told = json.loads(sys.stdin.readline())
    me, count, size = told["me"], told["messages"], told["size"]
    free = count - told.get("held", 0)
    other = 1 - me
    endpoint.connect(1, me, {other: told["peer"].encode()}, 30)
    link = endpoint._peers[other].link
    memory = {number: memoryview(bytearray(size)) for number in range(count)}
    for number, into in memory.items():
        endpoint.receive(other, number, 0, into)
    came: set[int] = set()
    sent, begun, extra, ending = 0, 0, 0, False
    while not ending:
        while begun < free and begun - sent < AT_ONCE:
            endpoint.send(other, begun, 0, memoryview(content(me, begun, size)))
            begun += 1
        for outcome in endpoint.progress(time.monotonic()):
            match outcome:
                case Received(_, op, 0):
                    assert op not in came, f"message {op} came twice"
                    assert bytes(memory[op]) == content(other, op, size), f"message {op} is wrong"
                    came.add(op)
                    if len(came) % 10 == 0:
                        say(came=len(came))
                case Sent(_, op, 0):
                    sent += 1
                case Received() | Sent():
                    pass
                case _:
                    say(lost=str(outcome))
                    return
        if len(came) == count and sent == count:
            if extra % 20 == 0:
                say(done={"failovers": link.failovers, "failbacks": link.failbacks, "resent": link.resent})
            extra += 1
            name = (count + extra, 1)
            endpoint.send(other, *name, memoryview(b"small"))
            endpoint.receive(other, *name, memoryview(bytearray(5)))
        poll = select.poll()
        for descriptor, mask in endpoint.descriptors().items():
            poll.register(descriptor, mask)
        poll.register(0, select.POLLIN)
        deadline = endpoint.next_deadline()
        wait = 20.0 if extra else 1000.0
        ready = poll.poll(wait if deadline is None else max(0.0, min(wait, (deadline - time.monotonic()) * 1000)))
        if any(descriptor == 0 for descriptor, _ in ready):
            free, ending = count, sys.stdin.readline() != "more\n"
        if extra:
            time.sleep(0.005)
    endpoint.close()


if __name__ == "__main__":
    main()
