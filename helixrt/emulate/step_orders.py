"""Replicas of the step world that change the order of their schedules, and what must hold of it.

In: the world's moments. Out: `OrderReady` for a replica now and then, each time with a higher number; a complaint if the
lineage names an order that is older than what it should be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from helixrt.emulate.step_node import Node
from helixrt.emulate.step_store import Batch
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord

_CHANCE = 0.05  # at each event of a replica


class Orders:
    """Of a world. Its random numbers are its own: with it and without it all else happens alike."""

    def __init__(self, seed: int) -> None:
        self._random, self._given = random.Random(f"orders {seed}"), 0
        self._worked: dict[tuple[int, Batch], str] = {}  # incarnation and batch -> the order that its newest work was by

    def handled(self, node: Node) -> None:
        """The replica has handled an event."""
        if self._random.random() < _CHANCE:
            self._given += 1
            node.machine.on(p.OrderReady(f"{self._given:04d}"))

    def works(self, node: Node, work: p.Work) -> None:
        """The replica begins this work."""
        self._worked[node.incarnation, (node.replica, work.position)] = work.order

    def complaint(self, chain: Sequence[CommitRecord]) -> str:
        """Along the chain no replica goes back to an earlier order, and a record never names an older one than that of the work
        in it: so whoever starts again does not, either. "" if that holds."""
        for before, record in zip(chain, chain[1:], strict=False):
            for replica in {*before.orders, *record.orders}:
                if record.orders.get(replica, "") < before.orders.get(replica, ""):
                    return f"replica {replica} goes back to an earlier order with step {record.step}"
            for replica, incarnation in record.contributors:  # a fenced one may still work on the batch
                batch = (replica, before.position(replica, record.deal))
                if self._worked[incarnation, batch] > record.orders.get(replica, ""):
                    return f"step {record.step} has work of replica {replica} by an order that it does not name"
        return ""
