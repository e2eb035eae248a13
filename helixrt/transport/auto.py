"""One endpoint over several transports: for every peer the best one that reaches it.

In: the run's secret, and the addresses of this host that TCP may use. Out: an `Endpoint`. Each peer's address
lists the transports it offers; both ends of a pair see both lists, test the same thing, and so choose the same.

- shared memory, if the peer's socket answers on this host (`shared_memory.address.listens`: a proof, no guess by names);
- else verbs, if both have RDMA ports of one kind (where those do not reach each other after all, their link runs over its
  last rail, TCP);
- else tcp.

Peers that are not on this host are watched by this rank's monitor process as well (`monitor`): it reports when one is stopped.

What was chosen and why is in `choices`, in the log "helixrt.transport" and in the flight record. A user can insist on one.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.protocol.link.options import LinkOptions
from helixrt.record import Kind
from helixrt.transport.choice import (
    AUTO,
    MONITOR,
    SHARED_MEMORY,
    TCP,
    TRANSPORTS,
    VERBS,
    Choice,
    check_transport,
    choose,
    pack_addresses,
    same_host,
    unpack_addresses,
)
from helixrt.transport.contract import Buffer, Endpoint, Outcome, Refused, Sink
from helixrt.transport.monitor import client as monitor
from helixrt.transport.monitor.peers import WatchedPeers
from helixrt.transport.shared_memory import address as shared_memory
from helixrt.transport.shared_memory.endpoint import SharedMemoryEndpoint
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.rails import TcpRail, parse_address
from helixrt.transport.verbs.devices import VerbsRail

if TYPE_CHECKING:
    from helixrt.transport.verbs.queue_pair import Patience

__all__ = ["TCP", "TRANSPORTS", "VERBS", "AutoEndpoint", "check_transport", "pack_addresses", "unpack_addresses"]

LOOPBACK_WARNING = (
    "rank %d listens on %s, which leads to its own host alone, and rank %d is on another host: give the run's servers an "
    "address that all hosts reach (`host=`, `helixrt serve --host`), or name rails"
)
_KEEP_ALIVE_S = 0.02
_LOOK_S = 0.001
_MONITOR_LOOK_S = 0.005  # at what the monitor reported, while `progress` is called again and again
_JOIN_S = 5.0  # for a turn of the thread that keeps links alive, which never blocks

_log = logging.getLogger("helixrt.transport")


class AutoEndpoint(Endpoint):
    """`host`: the address of this host that TCP binds to, or several, one rail each. `tcp` has its further options; what
    verbs know of those is the heartbeat, the record, the hopping and `attempt_s`. Without `watch_processes` a peer that can be
    reached is not lost while its process is stopped. `rdma`: the ports that verbs use, the default one
    first; None: every active one. With hopping the rails are paths, and verbs have no TCP rail behind theirs.

    `transport` insists on one. Raises ConfigError if it has no such name or does not work on this machine; `connect`
    does, if it does not reach a peer.
    """

    def __init__(
        self,
        secret: bytes,
        host: str | Sequence[str | TcpRail] = "127.0.0.1",
        *,
        transport: str = AUTO,
        heartbeat_s: float | None = 1.0,
        watch_processes: bool = True,
        tcp: TcpOptions | None = None,
        rdma: Sequence[VerbsRail] | None = None,
    ) -> None:
        check_transport(transport)
        options = replace(tcp or TcpOptions(), period_s=heartbeat_s)
        watch_s = heartbeat_s if watch_processes else None
        self._insists, self._record = transport, options.record
        self._endpoints: dict[str, TcpEndpoint | SharedMemoryEndpoint] = {}
        self._watched: WatchedPeers | None = None
        self._monitor_look_s = 0.0
        if transport in (AUTO, SHARED_MEMORY):
            if (reason := shared_memory.unsupported()) is None:
                self._endpoints[SHARED_MEMORY] = SharedMemoryEndpoint(secret, heartbeat_s=watch_s)
            else:
                _log.info("no shared memory here: %s", reason)
        rails = [TcpRail(host)] if isinstance(host, str) else [TcpRail(h) if isinstance(h, str) else h for h in host]
        try:
            if transport in (AUTO, VERBS):
                self._open_verbs(secret, rails[0], options, rdma)
            if transport in (AUTO, TCP):
                self._endpoints[TCP] = TcpEndpoint(secret, rails, options)
            if watch_s is not None and self._endpoints.keys() - {SHARED_MEMORY} and monitor.unsupported() is None:
                self._watched = WatchedPeers(rails[0].address, secret, watch_s)
        except BaseException:
            self.close()
            raise
        self._ways: dict[int, TcpEndpoint | SharedMemoryEndpoint] = {}
        self._choices: dict[int, Choice] = {}
        self._here: frozenset[str] = frozenset()  # sockets of this host, by the links that were made over them
        self._used: set[str] = set()  # transports that have peers; the others only refuse connections
        self._told: set[str] = set()  # how peers are reached
        self._look_s = 0.0  # when to look at those again
        self._early: list[Outcome] = []  # what came while the last transport still connected

    def _open_verbs(self, secret: bytes, management: TcpRail, tcp: TcpOptions, rails: Sequence[VerbsRail] | None) -> None:
        from helixrt.transport.verbs import endpoint as verbs

        if (reason := verbs.unsupported()) is not None:
            _log.info("no RDMA verbs here: %s", reason)
            return
        hopping = tcp.link.hopping
        options = verbs.VerbsOptions(
            period_s=tcp.period_s,
            record=tcp.record,
            restore_s=tcp.restore_s,
            link=LinkOptions(striped=hopping is not None, hopping=hopping, attempt_s=tcp.link.attempt_s),
            patience=_patience(tcp.period_s),
            tcp_fallback=hopping is None,
        )
        self._endpoints[VERBS] = verbs.VerbsEndpoint(secret, rails or verbs.rails_here(), management, options)

    @property
    def choices(self) -> Mapping[int, Choice]:
        """The transport of every peer of this generation, and why."""
        return self._choices

    def address(self) -> bytes:
        addresses = {name: endpoint.address() for name, endpoint in self._endpoints.items()}
        if self._watched is not None:
            addresses[MONITOR] = self._watched.address()
        return pack_addresses(addresses)

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        until = time.monotonic() + deadline_s
        self._early.clear()
        mine = {name: endpoint.address() for name, endpoint in self._endpoints.items()}
        groups: dict[str, dict[int, bytes]] = {name: {} for name in self._endpoints}
        monitors: dict[int, bytes] = {}
        self._ways, self._choices = {}, {}
        here, self._here = self._here, frozenset()  # whose owner has ended since then shows at the call
        for rank, raw in sorted(peers.items()):
            try:
                theirs = unpack_addresses(raw)
                asked = theirs.pop(MONITOR, None)
                choice = choose(mine, theirs, lambda name: name in here or shared_memory.listens(name))
            except ValueError as error:
                raise Retryable(Cause(f"rank {rank} cannot be reached: {error}", peers=(rank,))) from None
            if choice is None:
                rule = f"does not reach rank {rank}, which offers {', '.join(theirs) or 'nothing'}"
                if SHARED_MEMORY in mine and SHARED_MEMORY in theirs:
                    if same_host(mine, theirs):
                        what = f"rank {rank} is gone: no process answers at its address on this host"
                        raise Retryable(Cause(what, peers=(rank,)))
                    rule = f"does not reach rank {rank}, which is on another host; use {AUTO} or {TCP}"
                raise ConfigError("transport", self._insists, rule)
            self._choices[rank], groups[choice.transport][rank] = choice, theirs[choice.transport]
            self._warn_of_loopback(me, rank, choice, mine, theirs)
            if asked is not None and choice.transport != SHARED_MEMORY:  # on this host links look at the process themselves
                monitors[rank] = asked
            self._ways[rank] = self._endpoints[choice.transport]
        self._used = {name for name, group in groups.items() if group}
        connected: list[TcpEndpoint | SharedMemoryEndpoint] = []
        dead: list[tuple[int, Cause]] = []

        failed: list[Exception] = []  # to keep links alive

        def over() -> bool:
            if self._watched is not None:
                dead.extend(self._watched.dead(time.monotonic()))
            return bool(dead) or bool(failed) or stopped()

        try:
            if self._watched is not None:
                self._watched.watch(monitors)
            for name, endpoint in self._endpoints.items():
                others = [e for e in self._endpoints.values() if e is not endpoint]
                with self._kept_alive(others if groups[name] else [], connected, failed):
                    endpoint.connect(generation, me, groups[name], max(0.0, until - time.monotonic()), over)
                connected.append(endpoint)
        except BaseException as error:
            for endpoint in connected:
                endpoint.abort(Cause(f"rank {me} could not reach all its peers"))
            if dead and isinstance(error, Retryable):
                rank, cause = dead[0]
                silent = tuple(sorted(peer for peer, _ in dead))
                raise Retryable(Cause(f"rank {rank} does not come: {cause.what}", cause.rank, peers=silent)) from error
            raise
        if SHARED_MEMORY in groups:
            self._here = frozenset(shared_memory.parse_address(raw)[1] for raw in groups[SHARED_MEMORY].values())
        self._tell(me)

    def _warn_of_loopback(
        self, me: int, rank: int, choice: Choice, mine: Mapping[str, bytes], theirs: Mapping[str, bytes]
    ) -> None:
        """Once, if this rank listens on loopback alone and a peer is on another host, which cannot connect to it."""
        both_say = SHARED_MEMORY in mine and SHARED_MEMORY in theirs
        if choice.transport == SHARED_MEMORY or LOOPBACK_WARNING in self._told or not both_say or same_host(mine, theirs):
            return
        hosts = [host for host, _ in parse_address(mine[TCP])] if TCP in mine else []
        if hosts and all(ipaddress.ip_address(host).is_loopback for host in hosts):
            self._told.add(LOOPBACK_WARNING)
            _log.warning(LOOPBACK_WARNING, me, hosts[0], rank)

    def _tell(self, me: int) -> None:
        """Log how peers are reached, unless it is what was said before."""
        ranks: dict[Choice, list[str]] = {}
        for rank, choice in sorted(self._choices.items()):
            ranks.setdefault(choice, []).append(str(rank))
        for choice, reached in ranks.items():
            ways = f"rank {me} reaches rank {', '.join(reached)} by {choice.transport}: {choice.why}"
            if ways not in self._told:
                self._told.add(ways)
                _log.info(ways)
                if self._record is not None:
                    peers = [int(rank) for rank in reached]
                    self._record.write(Kind.REACHED, peers=peers, transport=choice.transport, why=choice.why)

    @contextmanager
    def _kept_alive(
        self, endpoints: Collection[Endpoint], connected: Collection[Endpoint], failed: list[Exception]
    ) -> Iterator[None]:
        """Drive those while another connects: peers wait for a sign of life, of a link or before a connection is accepted.

        What that raises ends it, is put in `failed` at once, and is raised at the end of the block.
        """
        stop = threading.Event()

        def drive() -> None:
            try:
                while not stop.wait(_KEEP_ALIVE_S):
                    for endpoint in endpoints:
                        outcomes = endpoint.progress(time.monotonic())
                        if endpoint in connected:  # else they are the last generation's
                            self._early += outcomes
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=drive, name="helixrt-keep-alive")
        if endpoints:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if endpoints:
                thread.join(_JOIN_S)
                if thread.is_alive():
                    raise Retryable(f"links could not be kept alive while others connected: a turn took over {_JOIN_S:g} s")
                if failed:
                    raise failed[0]

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        self._ways[peer].send(peer, op, index, data)

    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        self._ways[peer].receive(peer, op, index, into)

    def forget(self, op: int) -> None:
        for endpoint in self._endpoints.values():
            endpoint.forget(op)

    def descriptors(self) -> Mapping[int, int]:
        merged: dict[int, int] = {}
        for endpoint in self._endpoints.values():
            merged.update(endpoint.descriptors())
        if self._watched is not None and (news := self._watched.descriptor) >= 0:
            merged[news] = select.EPOLLIN
        return merged

    def progress(self, now: float) -> Sequence[Outcome]:
        outcomes = self._early
        self._early = []
        look, used = now >= self._look_s, self._used
        if look:
            self._look_s = now + _LOOK_S
            if self._watched is not None and now >= self._monitor_look_s:
                self._monitor_look_s = now + _MONITOR_LOOK_S
                for rank, cause in self._watched.dead(now):
                    self._ways[rank].lose(rank, cause)
        for name, endpoint in self._endpoints.items():
            if look or name in used:
                outcomes += endpoint.progress(now)
        return outcomes

    def flush(self) -> None:
        for name in self._used:
            self._endpoints[name].flush()

    def next_deadline(self) -> float | None:
        deadlines = [endpoint.next_deadline() for endpoint in self._endpoints.values()]
        if self._watched is not None:
            deadlines.append(self._watched.next_deadline())
        if self._early:
            return 0.0
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def abort(self, cause: Cause) -> None:
        self._early.clear()
        for endpoint in self._endpoints.values():
            endpoint.abort(cause)
        if self._watched is not None:
            self._watched.forget()

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        if self._watched is not None:
            self._watched.close()

    def refused(self) -> Refused:
        counts = [endpoint.refused() for endpoint in self._endpoints.values()]
        return Refused(sum(c.strangers for c in counts), sum(c.stale for c in counts))


def _patience(period_s: float | None) -> Patience:
    """Of a NIC with a path: as many times the usual one, up to a power of two, as the heartbeats are slow."""
    from helixrt.transport.verbs.queue_pair import Patience

    usual = Patience()
    slower = math.log2(period_s) if period_s is not None and period_s > 1 else 0.0
    return replace(usual, timeout=min(usual.timeout + int(slower), 24))
