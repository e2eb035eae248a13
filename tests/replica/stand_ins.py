"""What stands in for others in tests of one rank: an exchange, a state transport, and the store of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from helixrt.collectives.exchange import Exchange
from helixrt.errors import Retryable
from helixrt.replica.contracts import FetchReport, Shard, StateTransport
from helixrt.replica.store import MemoryRunStore

DEADLINE_S = 60.0


class Alone(Exchange):
    def configure(self, generation: int, members: Sequence[int], me: int, rendezvous: str) -> None:
        pass

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
        torch.div(source, divisor, out=out)

    def abort(self, generation: int = -1) -> None:
        pass

    def close(self) -> None:
        pass


class Doubles(Alone):
    """As if another replica had the same gradients."""

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
        assert divisor == 1, "the engine divides"
        torch.mul(source, 2, out=out)


class Gated(StateTransport):
    """Answers a fetch of a name when the test opens its gate."""

    def __init__(self) -> None:
        self.offered: dict[str, Mapping[str, torch.Tensor]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.begun: list[str] = []
        self.progress: threading.Event | None = None  # tells of each shard, and waits
        self.layouts: Callable[[str], tuple[Shard, ...]] | None = None  # of the peers' offers

    @property
    def address(self) -> str:
        return "gated"

    def offer(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.offered[name] = tensors

    def offers(self, name: str) -> bool:
        return name in self.offered

    def withdraw(self, name: str) -> None:
        self.offered.pop(name, None)

    def layout(self, name: str, donors: Sequence[str], wait_s: float) -> tuple[Shard, ...]:
        assert self.layouts is not None
        return self.layouts(name)

    def fetch(
        self,
        name: str,
        layout: Sequence[Shard],
        donors: Sequence[str],
        stall_s: float,
        on_shard: Callable[[Shard, str, bool], None] = lambda shard, donor, ok: None,
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        self.begun.append(name)
        assert self.gates[name].wait(DEADLINE_S)
        if self.progress is not None:
            for shard in layout:
                on_shard(shard, "peer", True)
                assert self.progress.wait(DEADLINE_S)
        return {s.name: torch.full(s.shape, 7.0) for s in layout}, FetchReport(1, {"peer": 1})

    def close(self) -> None:
        pass


class MoodyStore(MemoryRunStore):
    """Answers nothing while it is `away`, nor its first `late` calls; notes what it answers, and to which threads."""

    def __init__(self, why: str = "the store is away", late: int = 0) -> None:
        super().__init__()
        self.why, self.late, self.away = why, late, False
        self.values = self._values
        self.calls: list[tuple[str, str]] = []
        self.threads: list[int] = []  # of each call

    def _note(self, call: str, key: str) -> None:
        if self.away or self.late:
            self.late = max(0, self.late - 1)
            raise Retryable(self.why)
        self.calls.append((call, key))
        self.threads.append(threading.get_ident())

    def get(self, key: str) -> str | None:
        self._note("get", key)
        return super().get(key)

    def set(self, key: str, value: str) -> None:
        self._note("set", key)
        super().set(key, value)

    def put_if_absent(self, key: str, value: str) -> str:
        self._note("put_if_absent", key)
        return super().put_if_absent(key, value)
