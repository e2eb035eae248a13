"""An endpoint over RDMA verbs: queue pairs on several NICs to every peer, and TCP when no NIC is left.

In: the run's secret, this host's RDMA ports, and an address on the management network. Out: an `Endpoint` (`contract.py`).

Every pair of ranks has one `Link` over ordered rails: the default NIC, its backups, then (unless that is switched off) a
TCP connection. The link is not striped: traffic takes the lowest rail that works, as SHIFT's takes the default NIC, and
comes back to it when it does again. All of that is the machine's (`protocol/link/machine.py`, SHIFT section 4.3); this
driver only maps: a work completion that failed becomes `RailDown` with its class (`failure`), and so does a port that fails
(`port_watch`: by an asynchronous event, or sooner by its network interface, which goes down); `RestoreRail` resets a queue
pair and arms it again.

How peers meet, prove the secret, agree on generations and learn of each other's end is the TCP endpoint's (`tcp`,
`tcp.meeting`); a connection that was proved for a verbs rail carries the attributes of its queue pairs (`setup`).
SHIFT keeps those in a store on the management network; with either, what is up stays up when that network fails. A link
whose rails all fail while it does is lost with an error: nothing goes on over what the two ends did not agree on.

Memory of the caller is registered where it is, with the NIC that sends it first and in the background with the others.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from socket import socket

from helixrt.errors import Cause, ConfigError
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.messages import Failure, RailDown, RailMended
from helixrt.protocol.link.options import LinkOptions
from helixrt.record import FlightRecord
from helixrt.transport.contract import Buffer, Outcome
from helixrt.transport.process_memory import address_of
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.peer import CONTROL, Peer
from helixrt.transport.tcp.rails import MAX_RAILS, SocketTuning, TcpRail
from helixrt.transport.verbs import address as verbs_address
from helixrt.transport.verbs.address import VerbsAddress
from helixrt.transport.verbs.connection import VerbsConnection
from helixrt.transport.verbs.devices import Nic, VerbsRail, find_port, rails_here, readable
from helixrt.transport.verbs.failure import nobody_answered
from helixrt.transport.verbs.library import library
from helixrt.transport.verbs.memory import Registered, Registrations
from helixrt.transport.verbs.one_sided import Action, OneSided, Window, parse_window
from helixrt.transport.verbs.own_devices import OwnPort
from helixrt.transport.verbs.peer import VerbsPeer
from helixrt.transport.verbs.port_watch import Place, PortWatch
from helixrt.transport.verbs.queue_pair import Patience, QueuePair, Sizes
from helixrt.transport.verbs.resources import give_up, keep_for_ever
from helixrt.transport.verbs.setup import Background, Exchange, Rests
from helixrt.transport.verbs.wire import Attributes

_REPAIR_S = 0.02  # after a failure: what the rail carried goes over another one first


@dataclass(frozen=True, kw_only=True)
class VerbsOptions:
    """The settings of a verbs endpoint; all ranks of a run have the same. Times in seconds."""

    period_s: float | None = 1.0  # of liveness; None: only what a NIC reports is noticed
    link: LinkOptions = field(default_factory=lambda: LinkOptions(striped=False))  # its period is the one above
    sizes: Sizes = field(default_factory=Sizes)
    patience: Patience = field(default_factory=Patience)
    tcp_fallback: bool = True  # TCP is the last rail; without it a link with no NIC left waits, and is lost in time
    sockets: SocketTuning = field(default_factory=SocketTuning)
    missing_rail_s: float = 1.0  # `connect` waits so long for a peer's default rail when another is there
    restore_s: float = 2.0  # one attempt to set up a queue pair
    linger_s: float = 1.0  # `close` waits at most so long until the last bytes are out
    registered_bytes: int = 1 << 30  # of the caller's memory, kept registered per NIC
    record: FlightRecord | None = None  # gets events of rails that are left and that return

    def __post_init__(self) -> None:
        if self.link.striped and self.tcp_fallback:
            raise ConfigError("striped", True, "needs tcp_fallback=False: TCP would carry its share of the traffic")


def unsupported() -> str | None:
    """Why verbs cannot be used here; None if they can."""
    if not rails_here():
        return "this host has no active RDMA port"
    try:
        library()
    except ConfigError as error:
        return error.args[0]
    return None


class VerbsEndpoint(TcpEndpoint):
    """`rails`: this host's RDMA ports, the default first; rail k of one rank is connected to rail k of the other.

    `management` is where peers meet and where the TCP rail goes. Raises MissingExtra without pyverbs, ConfigError when
    there is no such port.
    """

    _batched = False

    def __init__(
        self,
        secret: bytes,
        rails: Sequence[VerbsRail],
        management: TcpRail = TcpRail(),  # noqa: B008  # frozen
        options: VerbsOptions | None = None,
    ) -> None:
        if not 1 <= len(rails) < MAX_RAILS:
            raise ConfigError("rails", len(rails), f"must be 1 to {MAX_RAILS - 1} RDMA ports")
        self.verbs_options = o = options or VerbsOptions()
        self._library = library()
        self._verbs_rails = tuple(rails)
        ports = [find_port(rail) for rail in rails]
        self._own_ports = tuple(OwnPort.of(port, gid) for port, gid in ports)
        tcp = TcpOptions(
            period_s=o.period_s,
            link=o.link,
            sockets=o.sockets,
            missing_rail_s=o.missing_rail_s,
            restore_s=o.restore_s,
            linger_s=o.linger_s,
            record=o.record,
        )
        super().__init__(secret, (management,), tcp)
        said = [(port.ethernet, readable(gid.address)) for port, gid in ports]
        self._address = verbs_address.pack(said, o.tcp_fallback, self._address)
        self._ours: VerbsAddress = verbs_address.parse(self._address)
        self._background = Background(self._watch)
        self._nics: dict[Place, Nic] = {}  # opened in the background
        self._ports = PortWatch(self._watch, self._port_failed, self._port_mended)
        self._places = [(rail.device, rail.port, rail.gid_index) for rail in rails]
        self._spare: dict[Place, list[QueuePair]] = {place: [] for place in self._places}
        self._retiring: list[tuple[Place, QueuePair]] = []
        self._rests = Rests()
        self._read_again = False
        self._exposed: list[tuple[Registered, Buffer]] = []
        self._registrations = {place: self._new_registrations(place) for place in self._places}

    # ---------------------------------------------------------------- peers

    def _new_peer(self, generation: int, rank: int, raw: bytes) -> Peer:
        theirs = verbs_address.parse(raw)
        count = self._ours.agrees(theirs)
        rails = count + (self._ours.fallback and theirs.fallback)
        if not rails:
            raise ValueError("its RDMA ports are of another kind than this rank's")
        link = Link(generation, rank, rails, self._link_options, self._draw, self._begun)
        gids = tuple(gid for _, gid in theirs.rails)
        return VerbsPeer(self, rank, link, [theirs.meeting] * rails, self._rails * rails, self._own_ports[:count], gids)

    def joined(self, peer: Peer, sock: socket, rail: int, incarnation: int, dialled: bool) -> None:
        assert isinstance(peer, VerbsPeer)
        if rail == CONTROL or rail >= peer.verbs_rails:
            super().joined(peer, sock, rail, incarnation, dialled)
            return

        def ready(pair: QueuePair, theirs: Attributes) -> None:
            peer.came(rail)
            self._rests.succeeded(key)
            self._look_at_the_clock()
            self._join(peer, pair, theirs, rail, incarnation)

        key, took_s = (peer.rank, rail), 0.0
        if self.now < (rested_s := self._rests.until(key)):
            sock.close()
            down = RailDown(rail, Failure.PATH, "it rests after a long attempt")
            self._watch.at(rested_s, functools.partial(peer.tell, down))
            return

        def failed(failure: Failure, reason: str) -> None:
            peer.came(rail)
            rested_s = self._rests.failed(key, took_s, self.now)
            self._watch.at(rested_s, functools.partial(peer.tell, RailDown(rail, failure, reason)))

        def connect(pair: QueuePair, theirs: Attributes) -> None:
            nonlocal took_s
            begin = time.monotonic()
            try:
                pair.connect(theirs, self._verbs_rails[rail])
            except self._library.Error as error:
                took_s = time.monotonic() - begin if nobody_answered(error) else 0.0
                raise

        arm, retire = functools.partial(self._arm, rail, peer.gids[rail]), functools.partial(self._retire, self._places[rail])
        expires_s = self.now + self.verbs_options.restore_s
        exchange = Exchange(self._watch, self._background, sock, dialled, expires_s, arm, connect, retire, ready, failed)
        peer.expect(rail, exchange)

    def _join(self, peer: VerbsPeer, pair: QueuePair, theirs: Attributes, rail: int, incarnation: int) -> None:
        place = self._places[rail]
        self._ports.add(place, self._nics[place])
        registrations, retire = self._registrations[place], functools.partial(self._retire_soon, place)
        generation = peer.link.generation
        connection = VerbsConnection(pair, theirs, registrations, peer, peer.rank, rail, generation, self.has_frames, retire)
        peer.put_in_service(connection, incarnation)

    def restore(self, peer: Peer, rail: int) -> None:
        """Later: the set-up of a queue pair holds the interpreter's lock, and would delay the handshake about this one.

        Not at all when the other end has begun by then: the machine hears how that ends, and a wait beside it would in the end
        take the rail for one that never came.
        """
        assert isinstance(peer, VerbsPeer)
        again = super().restore

        def begin() -> None:
            if not peer.expects(rail) and peer.rails[rail] is None:
                again(peer, rail)

        self._later(peer, begin)

    def look_for(self, peer: Peer, rail: int) -> None:
        """Likewise, unless the peer seems to be gone: then there is no hurry to send."""
        if peer.control is None:
            super().look_for(peer, rail)
        else:
            self._later(peer, functools.partial(super().look_for, peer, rail))

    def _look_at_the_clock(self) -> None:
        """The job that just ended held the interpreter's lock, so the time may be much later than this turn's `now`: who then
        counts from its beginning takes an answer for late before it can have come."""
        self.now, self._read_again = time.monotonic(), True

    def _tick(self) -> None:
        if self._read_again:  # what came by now is to be read before anything is late
            self._read_again = False
            self._watch.dispatch()
        super()._tick()

    def _later(self, peer: Peer, do: Callable[[], None]) -> None:
        def then() -> None:
            if self._peers.get(peer.rank) is peer and not peer.ended and not peer.left:
                do()

        self._watch.at(self.now + _REPAIR_S, then)

    # ---------------------------------------------------------------- queue pairs

    def _arm(self, rail: int, gid: str) -> tuple[QueuePair, Attributes]:
        """In the background: a queue pair of this rail's NIC, waiting to be connected to `gid`.

        Soft-RoCE (Linux 6.1) keeps the route of a queue pair over its reset: connected to another address, one may not send.
        """
        nic, spare = self._open(rail), self._spare[self._places[rail]]
        pair = next((each for each in list(spare) if each.reached in ("", gid)), None)
        if pair is not None:
            spare.remove(pair)
        else:
            if spare:  # for an address that may never come again
                give_up(spare.pop(0))
            pair = QueuePair(nic, self.verbs_options.sizes, self.verbs_options.patience)
        try:
            return pair, pair.arm()
        except BaseException:
            give_up(pair)
            raise

    def _open(self, rail: int) -> Nic:
        """In the background."""
        nic = self._nics.get(self._places[rail])
        if nic is None:
            nic = self._nics[self._places[rail]] = Nic(self._library, self._verbs_rails[rail])
        return nic

    def _retire_soon(self, place: Place, pair: QueuePair) -> None:
        """A connection was closed, so nothing that comes counts any more; and before its caller can have any memory back, the
        queue pair is reset. Meanwhile the handshake about it goes out."""
        self._retiring.append((place, pair))

    def _retire_all(self) -> None:
        while self._retiring:
            self._retire(*self._retiring.pop())

    def progress(self, now: float) -> Sequence[Outcome]:
        try:
            return super().progress(now)
        finally:
            if self._retiring:
                self._retire_all()

    def turn(self, until: float) -> None:
        super().turn(until)
        self._retire_all()

    def forget(self, op: int) -> None:
        super().forget(op)
        self._retire_all()

    def _leave(self, cause: Cause | None) -> None:
        super()._leave(cause)
        self._retire_all()

    def _retire(self, place: Place, pair: QueuePair) -> None:
        try:
            pair.disarm()
        except (self._library.Error, OSError):
            give_up(pair)  # destroyed, it does not answer either
        else:
            self._spare[place].append(pair)

    # ---------------------------------------------------------------- NICs

    def _port_failed(self, place: Place, reason: str) -> None:
        """All rails on a port fail together, before their completions report it one by one."""
        for peer, rail in self._rails_on(place):
            connection = peer.queue_pair(rail)
            if connection is not None:
                connection.fail(Failure.DEVICE, reason)

    def _port_mended(self, place: Place) -> None:
        """They are tried together when it is active again, before they would be by themselves."""
        for peer, rail in self._rails_on(place):
            if peer.queue_pair(rail) is None:
                peer.tell(RailMended(rail))

    def _rails_on(self, place: Place) -> list[tuple[VerbsPeer, int]]:
        rails = [rail for rail, other in enumerate(self._places) if other == place]
        peers = [peer for peer in self._peers.values() if isinstance(peer, VerbsPeer)]
        return [(peer, rail) for peer, rail in itertools.product(peers, rails) if rail < peer.verbs_rails]

    def _new_registrations(self, place: Place) -> Registrations:
        def register(address: int, length: int, writable: bool) -> Registered:
            access = self._library.enums.ACCESS_LOCAL_WRITE if writable else 0  # reads of a peer land in what is writable
            region: Registered = self._library.MR(self._nics[place].domain, length, access, address=address)
            return region

        return Registrations(register, self.verbs_options.registered_bytes)

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        if len(data) > self.verbs_options.sizes.bounce_bytes:
            self._register_everywhere(data)
        super().send(peer, op, index, data)

    def _register_everywhere(self, data: Buffer) -> None:
        """So that memory need not be registered at backups while a failure is handled (SHIFT section 4.2)."""
        for place, registrations in self._registrations.items():
            if place in self._nics and not registrations.knows(data):
                self._background.submit(functools.partial(registrations.remember, data), _ignore)

    # ---------------------------------------------------------------- reads and atomic operations

    def expose(self, memory: Buffer) -> bytes:
        """Let peers that get the bytes given back read `memory` and operate on its words, until this endpoint closes."""
        e = self._library.enums
        access = e.ACCESS_LOCAL_WRITE | e.ACCESS_REMOTE_READ | e.ACCESS_REMOTE_WRITE | e.ACCESS_REMOTE_ATOMIC
        address, keys = address_of(memory), []
        for rail in range(len(self._verbs_rails)):
            nic = self._background.call(functools.partial(self._open, rail))
            self._exposed.append((self._library.MR(nic.domain, len(memory), access, address=address), memory))
            keys.append(int(self._exposed[-1][0].rkey))
        return Window(address, len(memory), tuple(keys)).pack()

    def read(self, peer: int, window: bytes, offset: int, into: Buffer) -> OneSided:
        """Fill `into` from what the peer exposed; never blocks. Raises ValueError if the window is none or too small."""
        return self._ask(peer, OneSided(Action.READ, parse_window(window), offset, into))

    def fetch_add(self, peer: int, window: bytes, offset: int, amount: int) -> OneSided:
        """Add to a word of 8 bytes that the peer exposed, modulo 2^64; gives what it was."""
        return self._ask(peer, OneSided(Action.FETCH_ADD, parse_window(window), offset, operand=amount))

    def compare_swap(self, peer: int, window: bytes, offset: int, expected: int, new: int) -> OneSided:
        """Put `new` into a word of 8 bytes that the peer exposed if it is `expected`; gives what it was."""
        return self._ask(peer, OneSided(Action.COMPARE_SWAP, parse_window(window), offset, operand=expected, swap=new))

    def _ask(self, peer: int, operation: OneSided) -> OneSided:
        known = self._peer(peer)
        assert isinstance(known, VerbsPeer)
        if not known.verbs_rails:
            raise ValueError(f"rank {peer} is reached by TCP alone")
        if known.verbs_rails > len(operation.window.keys):
            raise ValueError(f"a window of {len(operation.window.keys)} rails: rank {peer} is reached by {known.verbs_rails}")
        known.ask(operation)
        return operation

    # ---------------------------------------------------------------- the end

    def _give_up(self) -> None:
        self._ports.close()
        if not self._background.stop():
            keep_for_ever(self)  # closing what a job of it uses, or collecting it, would end the process
            return
        for pairs in self._spare.values():
            for pair in pairs:
                give_up(pair)
        for registrations in self._registrations.values():
            registrations.clear()
        for region, _ in self._exposed:
            region.close()
        for nic in self._nics.values():
            give_up(nic)

    def disown(self) -> None:
        """In a forked child: closing its copies of what verbs made would close the parent's, so they are kept until the child
        ends."""
        super().disown()
        keep_for_ever(self)


def _ignore(result: object, error: BaseException | None) -> None:
    """The next user of the registration makes it again, and gets the error if that fails."""
