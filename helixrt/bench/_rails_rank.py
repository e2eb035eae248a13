"""One host of `helixrt bench rails`: as a host of `helixrt bench hopping`, and it records the events of its link. No torch.

In: as `_hopping_rank`, and `open_recorded` instead of `open`. Out: as there, and with `recording` all events of its one link
and the link's actions, to be replayed by the pure machine.
"""

from __future__ import annotations

import random
import time
from typing import Any

from helixrt.bench._hopping_rank import SECRET, Host, run
from helixrt.protocol.hopping.messages import HoppingOptions, Unloaded
from helixrt.protocol.link.messages import Action, Event
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.recording import Opening, Recording, said
from helixrt.record import FlightRecord
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.peer import Peer
from helixrt.transport.tcp.rails import rail_on


class RecordedEndpoint(TcpEndpoint):
    """Records the events of the link to its last peer."""

    def __init__(self, *args: Any, seed: int) -> None:
        super().__init__(*args)
        self._draw, self._seed = random.Random(seed), seed
        self._events: list[tuple[float, Event]] = []
        self._said: list[list[Any]] = []
        self._opening: Opening | None = None

    def _new_peer(self, generation: int, rank: int, raw: bytes) -> Peer:
        peer = super()._new_peer(generation, rank, raw)
        link, on = peer.link, peer.link.on

        def recorded(event: Event, now: float) -> list[Action]:
            self._events.append((now, event))
            actions = on(event, now)
            self._said += [[now, *one] for one in said(actions)]
            return actions

        link.on = recorded  # type: ignore[method-assign]
        self._opening = Opening(generation, rank, len(link.rails), link.options, self._seed)
        return peer

    def recording(self) -> list[str]:
        """The lines of a `Recording`."""
        assert self._opening is not None
        (link,) = (peer.link for peer in self._peers.values())
        counters = {"failovers": link.failovers, "failbacks": link.failbacks, "resent": link.resent}
        return list(Recording(self._opening, tuple(self._events), {"said": self._said, "counters": counters}).lines())


class RecordedHost(Host):
    def open_recorded(self, side: str, period_s: float, link: dict[str, Any], hopping: dict[str, Any] | None, seed: int) -> str:
        """An endpoint over all rails; its address. `link` and `hopping` are settings of `LinkOptions` and `HoppingOptions`."""
        policy = None
        if hopping is not None:
            policy = HoppingOptions(**(hopping | {"unloaded": Unloaded(**hopping["unloaded"])}))
        record = self.records[side] = FlightRecord(side)
        options = TcpOptions(period_s=period_s, link=LinkOptions(hopping=policy, **link), record=record, restore_s=0.5)
        rails = [rail_on(device) for device in self.devices]
        self.endpoints[side] = RecordedEndpoint(SECRET, rails, options, seed=seed)
        return self.endpoints[side].address().decode()

    def drive(self, seconds: float) -> None:
        """Only keep the links alive."""
        until = time.monotonic() + seconds
        self._drive(lambda: time.monotonic() >= until, until=until)

    def recording(self) -> list[str]:
        endpoint = self.endpoint
        assert isinstance(endpoint, RecordedEndpoint)
        return endpoint.recording()


if __name__ == "__main__":
    run(RecordedHost())
