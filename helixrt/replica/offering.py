"""What every transport does with offers: keep them by name, and fetch those of others by the common plan.

A transport adds how a peer asks (its server) and how to ask a peer (`link`).
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from helixrt.protocol.catchup import FetchRules
from helixrt.replica.contracts import FetchReport, Shard, StateTransport
from helixrt.replica.fetch import DonorLink, fetch_state
from helixrt.replica.state_bytes import StateBytes, layout_digest

OFFER_WAIT_S = 2.0  # a donor may be a moment from its snapshot
_BURST_S = 0.005  # of serving time that may run ahead of the pace


def default_serve_cpu() -> float:
    """2% of the processors this process may use, in cores: two ranks of a replica on one machine then stay
    below 5% of it even when their training leaves no core idle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return 0.02 * cores


class Pace:
    """Keeps what several threads do for others below `cores` of processor time, by having them sleep.

    0 or less is no limit.
    """

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spent(self, cpu_s: float) -> float:
        """Account for `cpu_s` of work; returns how long to sleep before more."""
        if self._cores <= 0:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + cpu_s / self._cores
            ahead = self._free_at - now
        return ahead if ahead > _BURST_S else 0.0


class OfferingTransport(StateTransport):
    """A `StateTransport` but for the wire."""

    def __init__(self, serve_cpu: float | None, rules: FetchRules | None) -> None:
        self._rules = rules or FetchRules()
        self._offers: dict[str, StateBytes] = {}
        self._offered = threading.Condition()
        self._pace = Pace(default_serve_cpu() if serve_cpu is None else serve_cpu)

    @abstractmethod
    def link(self, donor: str, name: str, digest: str, wait_s: float) -> DonorLink:
        """The way to what `donor` offers under `name` in the layout `digest`; answers take at most `wait_s`."""

    def offer(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        state = StateBytes(tensors)
        with self._offered:
            self._offers[name] = state
            self._offered.notify_all()

    def withdraw(self, name: str) -> None:
        with self._offered:
            self._offers.pop(name, None)

    def fetch(
        self,
        name: str,
        layout: Sequence[Shard],
        donors: Sequence[str],
        timeout_s: float,
        on_shard: Callable[[Shard, str, bool], None] = lambda shard, donor, ok: None,
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        digest = layout_digest(layout)
        wait_s = self._rules.request_timeout_s * self._rules.strikes

        def connect(donor: str) -> DonorLink:
            return self.link(donor, name, digest, wait_s)

        return fetch_state(layout, donors, connect, timeout_s, on_shard, self._rules)

    def find(self, name: str) -> StateBytes | None:
        """What is offered under `name`, perhaps after a moment."""
        with self._offered:
            self._offered.wait_for(lambda: name in self._offers, OFFER_WAIT_S)
            return self._offers.get(name)

    def still_offers(self, name: str, state: StateBytes) -> bool:
        """Whether `state` was not withdrawn meanwhile; what was read of it before is then as it was offered."""
        with self._offered:
            return self._offers.get(name) is state

    def withdraw_all(self) -> None:
        with self._offered:
            self._offers.clear()
