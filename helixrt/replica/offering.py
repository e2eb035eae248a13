"""What every transport does with offers: keep them by name, and fetch those of others by the common plan.

A transport adds how a peer asks (its server) and how to ask a peer (`link`).
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from helixrt.errors import Retryable
from helixrt.protocol.catchup import FetchRules
from helixrt.replica.contracts import FetchReport, Shard, StateTransport
from helixrt.replica.fetch import DonorGone, DonorLink, fetch_state
from helixrt.replica.manifest import layout_from_json, layout_to_json
from helixrt.replica.serving_pace import Pace, idle_processors
from helixrt.replica.state_bytes import StateBytes, layout_digest

OFFER_WAIT_S = 2.0  # a donor may be a moment from its snapshot


class OfferingTransport(StateTransport):
    """A `StateTransport` but for the wire.

    Serving uses at most `serve_cpu` cores (0: what the machine has to spare) and `serve_mb_s` MB/s (0: no limit).
    """

    def __init__(self, serve_cpu: float, serve_mb_s: float, rules: FetchRules | None) -> None:
        self._rules = rules or FetchRules()
        self._offers: dict[str, StateBytes] = {}
        self._offered = threading.Condition()
        self._pace = Pace(serve_cpu, 1e6 * serve_mb_s, None if serve_cpu else idle_processors())

    @abstractmethod
    def link(self, donor: str, name: str, digest: str, wait_s: float) -> DonorLink:
        """The way to what `donor` offers under `name` in the layout `digest`; answers take at most `wait_s`."""

    @abstractmethod
    def ask_layout(self, donor: str, name: str, wait_s: float) -> bytes:
        """The layout of `donor`'s offer (`layout_json` there), at most LAYOUT_LIMIT_BYTES. Raises DonorGone."""

    def layout(self, name: str, donors: Sequence[str], wait_s: float) -> tuple[Shard, ...]:
        reasons: list[str] = []
        for donor in dict.fromkeys(donors):
            try:
                return layout_from_json(self.ask_layout(donor, name, wait_s))
            except DonorGone as gone:
                reasons.append(str(gone))
            except ValueError as error:
                reasons.append(f"{donor} sends no layout: {error}")
        raise Retryable(f"nobody gave the layout of {name}: {'; '.join(reasons) or 'no donors'}")

    def layout_json(self, name: str) -> bytes | None:
        """For other ranks: the layout of the offer `name`; None if there is none."""
        state = self.find(name)
        return None if state is None else layout_to_json(state.layout).encode()

    def offer(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        state = StateBytes(tensors)
        with self._offered:
            self._offers[name] = state
            self._offered.notify_all()

    def offers(self, name: str) -> bool:
        with self._offered:
            return name in self._offers

    def withdraw(self, name: str) -> None:
        with self._offered:
            self._offers.pop(name, None)

    def fetch(
        self,
        name: str,
        layout: Sequence[Shard],
        donors: Sequence[str],
        stall_s: float,
        on_shard: Callable[[Shard, str, bool], None] = lambda shard, donor, ok: None,
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        digest = layout_digest(layout)
        wait_s = self._rules.request_timeout_s * self._rules.strikes

        def connect(donor: str) -> DonorLink:
            return self.link(donor, name, digest, wait_s)

        return fetch_state(layout, donors, connect, stall_s, on_shard, self._rules)

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
