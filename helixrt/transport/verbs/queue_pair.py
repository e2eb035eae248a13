"""A reliable queue pair with all the memory it needs, and its life: armed, connected, disarmed, armed again.

In: an open NIC and the sizes agreed for this endpoint. Out: attributes for the other end, and the verbs a connection
posts and polls with. Between `disarm` and the next `connect` nothing comes in and nothing goes out, whatever the other end
or the wire still does: a queue pair in RESET answers no packets, and each new connection begins with packet numbers of its own.
That is the fence of SHIFT section 4.3 (its reset of the default queue pair) at this end.

Memory of one: a ring of slots for chunks, which alone the other end may write; receives; and for what is sent a place per
work request and some larger ones for short messages, whose memory is not worth registering.
"""

from __future__ import annotations

import ipaddress
import mmap
import secrets
import select
from dataclasses import dataclass
from typing import Any

from helixrt.errors import ConfigError
from helixrt.protocol.verbs.flow import CHAIN, MAX_SLOTS, Bounds
from helixrt.transport.process_memory import address_of
from helixrt.transport.verbs.devices import Descriptor, Nic, VerbsRail, readable, with_event_descriptor
from helixrt.transport.verbs.wire import RECEIVE_BYTES, Attributes

RECEIVE_BIT = 1 << 62  # in the id of a receive's completion
_LIFE_SHIFT = 32
_POLLED = 8  # completions taken at once: of the many that a failure brings, only the first ones matter
NUMBER_MASK = (1 << _LIFE_SHIFT) - 1  # the lowest bits of a number, or the index of a receive


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one queue pair. Both ends use their own.

    Larger chunks cost less of this process's time per byte; a ring is registered, so it costs memory for every peer and rail.
    In the lab a link reaches 0.92 of a bare ring's throughput with chunks of 256 KiB, and 0.98 or more with 1 MiB.
    """

    chunk_bytes: int = 1 << 20  # of a ring's slot, and of one write
    slots: int = 16
    receives: int = 128  # posted: messages that may be on their way here
    sends: int = 128  # posted: messages that may be on their way from here
    bounces: int = 16  # short messages that are copied to be sent
    bounce_bytes: int = 64 << 10
    signal_every: int = 16  # work requests per completion, while there is more to send

    def __post_init__(self) -> None:
        if not 4096 <= self.chunk_bytes <= 1 << 30:
            raise ConfigError("chunk_bytes", self.chunk_bytes, "must be 4 KiB to 1 GiB")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ConfigError("slots", self.slots, f"must be 1 to {MAX_SLOTS}")
        for key in ("receives", "sends"):
            if getattr(self, key) < 64 or getattr(self, key) % CHAIN:
                raise ConfigError(key, getattr(self, key), f"must be at least 64, and a multiple of {CHAIN}")
        if not 1 <= self.signal_every <= self.sends // 4:
            raise ConfigError("signal_every", self.signal_every, f"must be 1 to a quarter of sends={self.sends}")

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            sends=self.sends,
            receives=self.receives,
            slots=self.slots,
            bounces=self.bounces,
            signal_every=self.signal_every,
        )


@dataclass(frozen=True, kw_only=True)
class Patience:
    """When a NIC gives up on a path: after about 4.096 us x 2^timeout x (retries + 1)."""

    timeout: int = 14
    retries: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.timeout <= 31:
            raise ConfigError("timeout", self.timeout, "must be 1 to 31 (4.096 us x 2^timeout); 0 would wait without end")
        if not 0 <= self.retries <= 6:
            raise ConfigError("retries", self.retries, "must be 0 to 6; some devices take 7 for never to give up")


class QueuePair:
    """Raises what pyverbs raises, and OSError."""

    def __init__(self, nic: Nic, sizes: Sizes, patience: Patience) -> None:
        library = nic.library
        e = library.enums
        self.nic, self.sizes, self._patience = nic, sizes, patience
        self._closing: list[Any] = []
        self.life = 0  # how many times it was armed; in the id of every work request
        self.reached = ""  # the GID it was connected to last, also in a life before
        self._packet = 0
        try:
            self._make_memory(nic)
            self.channel, number = with_event_descriptor(lambda: library.CompChannel(nic.context))
            self._closing.append(self.channel)
            self.events = Descriptor(number)
            self.queue = library.CQ(nic.context, sizes.receives + sizes.sends + CHAIN, None, self.channel, 0)
            self._closing.append(self.queue)
            cap = library.QPCap(max_send_wr=sizes.sends, max_recv_wr=sizes.receives, max_send_sge=1, max_recv_sge=1)
            init = library.QPInitAttr(qp_type=e.QPT_RC, scq=self.queue, rcq=self.queue, cap=cap, sq_sig_all=0)
            self.pair = library.QP(nic.domain, init)
            self._closing.append(self.pair)
        except BaseException:
            self.close()
            raise
        self._sges = [library.SGE(0, 0, 0) for _ in range(CHAIN)]
        self._chain: list[Any] = []
        for sge in self._sges:
            request = library.SendWR(num_sge=1, sg=[sge])
            request.sg_list = sge  # so that changing the element changes the request
            self._chain.append(request)
        for one, after in zip(self._chain, self._chain[1:], strict=False):
            one.next_wr = after
        self._receives = [self._receive(index) for index in range(sizes.receives)]
        for index, one in enumerate(self._receives):
            if (index + 1) % CHAIN:
                one.next_wr = self._receives[index + 1]

    def _make_memory(self, nic: Nic) -> None:
        sizes, e = self.sizes, nic.library.enums
        ring = sizes.slots * sizes.chunk_bytes
        own = (sizes.receives + sizes.sends) * RECEIVE_BYTES + sizes.bounces * sizes.bounce_bytes
        self._views = views = [memoryview(mmap.mmap(-1, ring)), memoryview(mmap.mmap(-1, own))]
        rights = (e.ACCESS_LOCAL_WRITE | e.ACCESS_REMOTE_WRITE, e.ACCESS_LOCAL_WRITE)
        regions = []
        for view, access in zip(views, rights, strict=True):
            region = nic.library.MR(nic.domain, len(view), access, address=address_of(view))
            self._closing.append(region)
            regions.append(region)
        self._ring_address, self._ring_key = address_of(views[0]), int(regions[0].rkey)
        self._own_address, self.key = address_of(views[1]), int(regions[1].lkey)
        self._sends_at = sizes.receives * RECEIVE_BYTES
        self._bounces_at = self._sends_at + sizes.sends * RECEIVE_BYTES

    def _receive(self, index: int) -> Any:
        library = self.nic.library
        sge = library.SGE(self._own_address + index * RECEIVE_BYTES, RECEIVE_BYTES, self.key)
        return library.RecvWR(num_sge=1, sg=[sge])

    # ---------------------------------------------------------------- memory

    def slot(self, number: int) -> memoryview:
        begin = number * self.sizes.chunk_bytes
        return self._views[0][begin : begin + self.sizes.chunk_bytes]

    def received(self, index: int) -> memoryview:
        begin = index * RECEIVE_BYTES
        return self._views[1][begin : begin + RECEIVE_BYTES]

    def sending(self, number: int) -> tuple[memoryview, int]:
        """Memory that belongs to work request `number` until it is completed, and its address."""
        begin = self._sends_at + number % self.sizes.sends * RECEIVE_BYTES
        return self._views[1][begin : begin + RECEIVE_BYTES], self._own_address + begin

    def bounce(self, number: int) -> tuple[memoryview, int]:
        """Likewise for the `number`th short message."""
        begin = self._bounces_at + number % self.sizes.bounces * self.sizes.bounce_bytes
        return self._views[1][begin : begin + self.sizes.bounce_bytes], self._own_address + begin

    # ---------------------------------------------------------------- its life

    def arm(self) -> Attributes:
        """A new life: nothing of the old one is left, all receives are posted. What the other end needs to know."""
        e = self.nic.library.enums
        self.nic.look_again()
        self.disarm()
        while select.select([self.events], [], [], 0)[0]:
            self.take_event()  # of a life before
        while self.queue.poll(64)[0]:
            pass
        self.life = self.life % 0xFFFF + 1
        self._packet = secrets.randbits(24)
        attributes = self.nic.library.QPAttr()
        attributes.qp_state, attributes.pkey_index, attributes.port_num = e.QPS_INIT, 0, self.nic.rail.port
        attributes.qp_access_flags = (
            e.ACCESS_LOCAL_WRITE | e.ACCESS_REMOTE_WRITE | e.ACCESS_REMOTE_READ | e.ACCESS_REMOTE_ATOMIC
        )
        self.pair.modify(attributes, e.QP_STATE | e.QP_PKEY_INDEX | e.QP_PORT | e.QP_ACCESS_FLAGS)
        for index in range(0, self.sizes.receives, CHAIN):
            self.post_receives(index)
        self.queue.req_notify()
        sizes = self.sizes
        return Attributes(
            int(self.pair.qp_num), self._packet, self.nic.gid.address.packed, self.nic.lid, self.nic.mtu,
            self._ring_address, self._ring_key, sizes.slots, sizes.receives, sizes.chunk_bytes,
        )  # fmt: skip

    def connect(self, theirs: Attributes, rail: VerbsRail) -> None:
        """After `arm`: both directions are open when the other end has done the same. `rail` is of this NIC."""
        nic, library = self.nic, self.nic.library
        e = library.enums
        self.reached = readable(ipaddress.IPv6Address(theirs.gid))
        route = library.GlobalRoute(
            dgid=library.GID(_gid_text(theirs.gid)),
            sgid_index=nic.gid.index,
            hop_limit=64,
            flow_label=rail.flow_label,
            traffic_class=rail.traffic_class,
        )
        is_global = int(nic.port.ethernet or not theirs.lid)
        attributes = library.QPAttr()
        attributes.ah_attr = library.AHAttr(
            dlid=theirs.lid, is_global=is_global, port_num=nic.rail.port, gr=route if is_global else None
        )
        attributes.qp_state, attributes.path_mtu = e.QPS_RTR, min(nic.mtu, theirs.mtu)
        attributes.dest_qp_num, attributes.rq_psn = theirs.number, theirs.packet
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = nic.reads, 1
        self.pair.modify(
            attributes,
            e.QP_STATE | e.QP_AV | e.QP_PATH_MTU | e.QP_DEST_QPN | e.QP_RQ_PSN | e.QP_MAX_DEST_RD_ATOMIC
            | e.QP_MIN_RNR_TIMER,
        )  # fmt: skip
        attributes = library.QPAttr()
        attributes.qp_state, attributes.sq_psn, attributes.max_rd_atomic = e.QPS_RTS, self._packet, nic.reads
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = self._patience.timeout, self._patience.retries, 7
        self.pair.modify(
            attributes,
            e.QP_STATE | e.QP_SQ_PSN | e.QP_MAX_QP_RD_ATOMIC | e.QP_TIMEOUT | e.QP_RETRY_CNT | e.QP_RNR_RETRY,
        )

    def disarm(self) -> None:
        """Nothing comes and nothing goes from now on, and nothing that was posted will be completed."""
        attributes = self.nic.library.QPAttr()
        attributes.qp_state = self.nic.library.enums.QPS_RESET
        self.pair.modify(attributes, self.nic.library.enums.QP_STATE)

    def close(self) -> None:
        """Gives up everything. Raises what pyverbs raised first, after all of it."""
        first: BaseException | None = None
        for each in reversed(self._closing):
            try:
                each.close()
            except Exception as error:
                first = first or error
        self._closing.clear()
        if first is not None:
            raise first

    # ---------------------------------------------------------------- its work

    def post_receives(self, first: int) -> None:
        """The CHAIN receives from `first` on, which are used up, again."""
        for index in range(first, first + CHAIN):
            self._receives[index].wr_id = RECEIVE_BIT | self.life << _LIFE_SHIFT | index
        self.pair.post_recv(self._receives[first])

    def post(self, requests: list[Request]) -> None:
        """At most CHAIN, with one call."""
        begin = CHAIN - len(requests)
        chain = self._chain
        for at, r in enumerate(requests, begin):
            wr, sge = chain[at], self._sges[at]
            wr.wr_id = self.life << _LIFE_SHIFT | r.number & NUMBER_MASK
            wr.opcode, wr.send_flags, wr.imm_data = r.opcode, r.flags, r.immediate
            sge.addr, sge.length, sge.lkey = r.address, r.length, r.key
            if r.atomic is not None:
                wr.set_wr_atomic(r.remote_key, r.remote_address, *r.atomic)
            elif r.remote_key is not None:
                wr.set_wr_rdma(r.remote_key, r.remote_address)
        self.pair.post_send(chain[begin])

    def poll(self) -> list[Any]:
        """Completions of this life that have come, oldest first; some at a time."""
        while True:
            count, found = self.queue.poll(_POLLED)
            ours = [each for each in found if (each.wr_id & ~RECEIVE_BIT) >> _LIFE_SHIFT == self.life]
            if ours or not count:
                return ours

    def take_event(self) -> None:
        """Consume one completion event (the descriptor must be readable) and ask for the next."""
        self.channel.get_cq_event(self.queue)
        self.queue.ack_events(1)
        self.queue.req_notify()


@dataclass(slots=True)
class Request:
    """A work request to post: `length` bytes at `address`, registered under `key`."""

    number: int
    opcode: int
    flags: int
    address: int
    length: int
    key: int
    immediate: int = 0
    remote_address: int = 0
    remote_key: int | None = None
    atomic: tuple[int, int] | None = None  # what to add or compare with, and what to swap in


def _gid_text(raw: bytes) -> str:
    return ":".join(raw[at : at + 2].hex() for at in range(0, 16, 2))
