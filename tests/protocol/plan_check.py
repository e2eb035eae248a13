"""Proves that the plans of all ranks fit together, whatever the order in which things happen.

In: the plans of all ranks of one collective, and the offset of OUT relative to SOURCE if they share memory.
Out: nothing, or a `PlanError` that names the error and its place. It is the oracle of the algorithms' tests.

What is proved: regions lie in their memory; every send has one receive of the same length; two nodes of a
rank that touch the same bytes, one of them writing, are ordered by dependencies or messages; and nothing waits for
itself, even when a message needs its receiver's credit and a sender may have one unacknowledged message per
peer. The last is exact: more credit or a wider window only removes edges from the graph that is searched.

Sent and replaced: a message may be received where another one was sent from, without a wait for the acknowledgement of that, if
it is sent after that had arrived, by the dependencies of all ranks. A link may send the earlier one again then, with the new
bytes; its receiver has the message already and drops the copy (`protocol.link.ledger`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from helixrt.protocol.collective.plan import Copy, Node, Plan, Receive, Reduce, Region, Send, Space


class PlanError(AssertionError):
    """The plans do not fit together."""


def check(
    plans: Sequence[Plan], source_bytes: Sequence[int], out_bytes: Sequence[int], shift: Sequence[int] | None = None
) -> None:
    """`plans[r]` is rank r's; with `shift`, r's OUT begins `shift[r]` bytes behind the beginning of its SOURCE, in the
    same memory; without, they are disjoint."""
    for rank, plan in enumerate(plans):
        _check_regions(rank, plan, source_bytes[rank], out_bytes[rank])
    _check_messages(plans)
    arrivals = _Arrivals(plans)
    for rank, plan in enumerate(plans):
        _check_races(rank, plan, None if shift is None else shift[rank], arrivals)
    _check_progress(plans)


def reads_and_writes(node: Node) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    match node:
        case Send():
            return (node.region,), ()
        case Receive():
            return () if node.left is None else (node.left,), (node.region,)
        case Reduce():
            return (node.left, node.right), node.into
        case Copy():
            return (node.source,), (node.into,)


def _check_regions(rank: int, plan: Plan, source_bytes: int, out_bytes: int) -> None:
    sizes = {Space.SOURCE: source_bytes, Space.OUT: out_bytes, Space.SCRATCH: plan.scratch_bytes}
    for number, node in enumerate(plan.nodes):
        reads, writes = reads_and_writes(node)
        for region in (*reads, *writes):
            if region.offset < 0 or region.length < 0 or region.offset + region.length > sizes[region.space]:
                raise PlanError(f"rank {rank}, node {number}: {region} is outside {sizes[region.space]} bytes")
        if any(w.space is Space.SOURCE for w in writes):
            raise PlanError(f"rank {rank}, node {number}: writes SOURCE")
        if len({r.length for r in (*reads, *writes)}) > 1:
            raise PlanError(f"rank {rank}, node {number}: lengths differ: {node}")


def _ancestors(plan: Plan) -> list[int]:
    """For each node, a bit set of the nodes that are done before it begins."""
    found: list[int] = []
    for earlier in plan.after:
        bits = 0
        for e in earlier:
            bits |= found[e] | 1 << e
        found.append(bits)
    return found


class _Arrivals:
    """The order between nodes of all ranks: by the dependencies of each, and because messages are sent before they arrive."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self._first = [0]
        for plan in plans:
            self._first.append(self._first[-1] + len(plan.nodes))
        self._before: dict[int, int] | None = None  # of each node of all ranks, as far as there is an order

    def precedes(self, rank: int, earlier: int, later: int) -> bool:
        """Whether node `earlier` of `rank` is done, and has arrived if it is sent, before node `later` touches anything."""
        one = self._plans[rank].nodes[earlier]
        if self._before is None:
            self._before = self._order()
        done = self._node(one.peer, rank, one.index, sends=False) if isinstance(one, Send) else self._first[rank] + earlier
        return done is not None and bool(self._before.get(self._first[rank] + later, 0) >> done & 1)

    def _node(self, rank: int, peer: int, index: int, sends: bool) -> int | None:
        """The number of `rank`'s end of a message with `peer` among the nodes of all ranks; None if there is none."""
        if not 0 <= rank < len(self._plans):
            return None
        found = self._plans[rank].index
        table = found.sends if sends else found.receives
        numbers = table[peer] if peer < len(table) else ()
        return self._first[rank] + numbers[index] if index < len(numbers) else None

    def _order(self) -> dict[int, int]:
        """For each node a bit set of those that are done before it begins; a message is received after it is sent."""
        waits: dict[int, list[int]] = {}
        for rank, plan in enumerate(self._plans):
            for number, earlier in enumerate(plan.after):
                waits[self._first[rank] + number] = [self._first[rank] + e for e in earlier]
            for number, node in _messages(plan, Receive):
                if (sent := self._node(node.peer, rank, node.index, sends=True)) is not None:
                    waits[self._first[rank] + number].append(sent)
        next_of: dict[int, list[int]] = {}
        for node_number, earlier_ones in waits.items():
            for e in earlier_ones:
                next_of.setdefault(e, []).append(node_number)
        left = {number: len(earlier_ones) for number, earlier_ones in waits.items()}
        ready = [number for number, count in left.items() if not count]
        before = {number: 0 for number in ready}
        while ready:
            done = ready.pop()
            for number in next_of.get(done, ()):
                before[number] = before.get(number, 0) | before[done] | 1 << done
                left[number] -= 1
                if not left[number]:
                    ready.append(number)
        return {number: bits for number, bits in before.items() if not left[number]}


def _check_races(rank: int, plan: Plan, shift: int | None, arrivals: _Arrivals) -> None:
    before = _ancestors(plan)

    def addresses(region: Region) -> tuple[Space, int, int]:
        if region.space is Space.OUT and shift is not None:
            return Space.SOURCE, region.offset + shift, region.offset + shift + region.length
        return region.space, region.offset, region.offset + region.length

    spans: list[tuple[str, int, int, int, bool]] = []  # memory, begin, end, node, writes
    for number, node in enumerate(plan.nodes):
        reads, writes = reads_and_writes(node)
        for regions, writing in ((reads, False), (writes, True)):
            for region in regions:
                space, begin, end = addresses(region)
                if begin < end:
                    spans.append((space.value, begin, end, number, writing))
    spans.sort()
    open_spans: list[tuple[str, int, int, int, bool]] = []
    for span in spans:
        open_spans = [o for o in open_spans if o[0] == span[0] and o[2] > span[1]]
        for o in open_spans:
            if not (o[4] or span[4]):
                continue
            a, b = o[3], span[3]
            if a == b:
                if o[1:3] != span[1:3]:  # element by element in the same place is fine, shifted is not
                    raise PlanError(f"rank {rank}, node {a}: reads and writes overlap: {plan.nodes[a]}")
            elif before[b] >> a & 1 or before[a] >> b & 1:
                continue
            elif not (arrivals.precedes(rank, a, b) or arrivals.precedes(rank, b, a)):
                what = f"{plan.nodes[a]} and {plan.nodes[b]}"
                raise PlanError(f"rank {rank}: nodes {a} and {b} may touch the same bytes at once: {what}")
        open_spans.append(span)


def _messages(plan: Plan, kind: type[Send] | type[Receive]) -> Iterable[tuple[int, Send | Receive]]:
    return ((number, node) for number, node in enumerate(plan.nodes) if isinstance(node, kind))


def _check_messages(plans: Sequence[Plan]) -> None:
    received = {(n.peer, rank, n.index): n.region.length for rank, p in enumerate(plans) for _, n in _messages(p, Receive)}
    sent = {(rank, n.peer, n.index): n.region.length for rank, p in enumerate(plans) for _, n in _messages(p, Send)}
    for name in sorted(sent.keys() | received.keys()):
        sender, receiver, index = name
        if sender == receiver or not (0 <= sender < len(plans) and 0 <= receiver < len(plans)):
            raise PlanError(f"message {index} from rank {sender} to rank {receiver} of {len(plans)} ranks")
        if sent.get(name) != received.get(name):
            what = f"message {index} from rank {sender} to rank {receiver}"
            raise PlanError(f"{what}: {sent.get(name)} bytes are sent, {received.get(name)} received")


def _check_progress(plans: Sequence[Plan]) -> None:
    """Kahn's order over everyone's nodes: a message is one vertex, done when both ends may begin, and the next
    message of its pair begins after it."""
    first = [0]
    for plan in plans:
        first.append(first[-1] + len(plan.nodes))
    vertex = list(range(first[-1]))
    for rank, plan in enumerate(plans):
        for peer, numbers in enumerate(plan.index.sends):
            for number, other in zip(numbers, plans[peer].index.receives[rank] if numbers else (), strict=True):
                vertex[first[peer] + other] = first[rank] + number
    waits: list[set[int]] = [set() for _ in vertex]
    for rank, plan in enumerate(plans):
        for number, earlier in enumerate(plan.after):
            waits[vertex[first[rank] + number]] |= {vertex[first[rank] + e] for e in earlier}
        for numbers in plan.index.sends:
            for a, b in zip(numbers, numbers[1:], strict=False):
                waits[first[rank] + b].add(first[rank] + a)
    next_of: dict[int, list[int]] = {}
    for v, earlier_ones in enumerate(waits):
        for e in earlier_ones:
            next_of.setdefault(e, []).append(v)
    left = [len(w) for w in waits]
    ready = [v for v, count in enumerate(left) if not count]
    done = 0
    while ready:
        done += 1
        for v in next_of.get(ready.pop(), ()):
            left[v] -= 1
            if not left[v]:
                ready.append(v)
    if done < len(vertex):
        stuck = [
            f"rank {rank}: {plan.nodes[n]}"
            for rank, plan in enumerate(plans)
            for n in range(len(plan.nodes))
            if left[first[rank] + n]
        ]
        raise PlanError(f"{len(stuck)} nodes wait for one another, the first: {'; '.join(stuck[:4])}")
