"""Catch-up: which bytes of a peer's state to ask from which donor, and what to do when one fails.

In: how many bytes there are, the donors, and events (a piece arrived or was spoilt, a donor is lost,
time passed). Out: actions (ask, keep, drop a donor, finished, failed). FT-HSDP section 4.3's
peer-to-peer fetch; the balancing rule is ours.

The state is seen as one run of bytes, its shards one after another, cut into equal pieces. So
neither one huge tensor nor a thousand tiny ones unbalance the donors. Each donor is given an equal
share up front; a donor that has finished its own takes over pieces from one that has had `patience_s`
and whose rest would take longer than that again at its rate so far. A piece that was asked twice counts where it arrived
intact first.
Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class FetchRules:
    """`in_flight` requests per donor at a time. A piece that takes longer than `request_timeout_s` is asked from another
    donor as well. A donor is dropped after `strikes`: pieces that were spoilt, and times in a row that nothing came from
    it for `request_timeout_s`. So one that is slow is kept as long as its bytes come."""

    in_flight: int = 2
    piece_floor_bytes: int = 1 << 10
    piece_limit_bytes: int = 1 << 20
    pieces_per_donor: int = 16
    request_timeout_s: float = 5.0
    patience_s: float = 0.5
    strikes: int = 3


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` (exclusive) of the state."""

    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Again(StrEnum):
    """Why a piece was asked again."""

    CHECKSUM = "checksum"
    DONOR_LOST = "donor_lost"
    SLOW = "slow"


# Events


@dataclass(frozen=True)
class Begin:
    """Start asking."""


@dataclass(frozen=True)
class Arrived:
    """A donor's answer has arrived; `intact`: whether its checksum is right."""

    donor: str
    piece: Piece
    intact: bool


@dataclass(frozen=True)
class Heard:
    """Bytes of an answer have come from this donor, though not all of it."""

    donor: str


@dataclass(frozen=True)
class DonorLost:
    """A donor is gone, or does not have what it should."""

    donor: str
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = Begin | Arrived | Heard | DonorLost | Tick

# Actions


@dataclass(frozen=True)
class Ask:
    donor: str
    piece: Piece


@dataclass(frozen=True)
class Keep:
    """Put the piece that just arrived from this donor into the state; no other copy of it will be kept."""

    donor: str
    piece: Piece


@dataclass(frozen=True)
class Drop:
    """Have nothing more to do with this donor."""

    donor: str
    reason: str


@dataclass(frozen=True)
class Finished:
    """Every byte is here."""


@dataclass(frozen=True)
class Failed:
    """No donor is left."""

    reason: str


Action = Ask | Keep | Drop | Finished | Failed


def cut(total_bytes: int, donors: int, rules: FetchRules) -> list[Piece]:
    """Equal pieces (they differ by at most one byte): `pieces_per_donor` for each, within floor and limit.

    Their number is a multiple of the donors', unless the state is too small for that.
    """
    if total_bytes == 0:
        return []
    size = min(max(total_bytes // (donors * rules.pieces_per_donor), rules.piece_floor_bytes), rules.piece_limit_bytes)
    number = -(-total_bytes // size)
    number = min(-(-number // donors) * donors, total_bytes)
    edges = [total_bytes * i // number for i in range(number + 1)]
    return [Piece(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]


@dataclass
class _Donor:
    """What is left for a donor to send: `queue` not asked yet, `flying` asked at that time."""

    name: str
    queue: deque[Piece] = field(default_factory=deque)
    flying: dict[Piece, float] = field(default_factory=dict)
    late: set[Piece] = field(default_factory=set)  # of `flying`: asked again elsewhere
    began: float | None = None
    kept_bytes: int = 0
    spoilt: int = 0  # pieces
    silent: int = 0  # successive timeouts without data, counted for each expected piece
    heard: float = 0.0  # when bytes came last

    @property
    def strikes(self) -> int:
        return self.spoilt + self.silent

    def rest_bytes(self) -> int:
        return sum(p.nbytes for p in self.queue) + sum(p.nbytes for p in self.flying)

    def rest_s(self, now: float, patience_s: float) -> float:
        """How long the rest will take at the rate so far. Counts as no time while patience lasts: the rate
        of a donor's first few pieces is not reliable."""
        if self.began is None or now - self.began <= patience_s:
            return 0.0
        if not self.kept_bytes:
            return float("inf")
        return self.rest_bytes() * (now - self.began) / self.kept_bytes


class Fetch:
    """One fetch of `total_bytes` from `donors` (distinct names, at least one)."""

    def __init__(self, total_bytes: int, donors: Sequence[str], rules: FetchRules | None = None) -> None:
        assert donors and len(set(donors)) == len(donors)
        self.rules = rules or FetchRules()
        self._donors = {name: _Donor(name) for name in donors}
        self._kept_from = dict.fromkeys(donors, 0)
        self._open: set[Piece] = set()  # pieces not kept yet
        self._ended = False
        self._last_loss = ""
        self.retried: dict[str, int] = {}
        pieces = cut(total_bytes, len(donors), self.rules)
        self._open.update(pieces)
        for i, donor in enumerate(self._donors.values()):
            share = slice(len(pieces) * i // len(donors), len(pieces) * (i + 1) // len(donors))
            donor.queue.extend(pieces[share])

    @property
    def per_donor(self) -> dict[str, int]:
        """Bytes kept from every donor, lost ones too."""
        return dict(self._kept_from)

    def on(self, event: Event, now: float) -> list[Action]:
        """Take an event at time `now` (seconds, never going back). After Finished or Failed: no actions."""
        if self._ended:
            return []
        actions: list[Action] = []
        match event:
            case Begin() | Tick():
                actions += self._late(now)
            case Heard(name) if name in self._donors:
                self._donors[name].heard, self._donors[name].silent = now, 0
                return []
            case Arrived(name, piece, intact) if name in self._donors:
                self._donors[name].heard, self._donors[name].silent = now, 0
                actions += self._arrived(self._donors[name], piece, intact)
            case DonorLost(name, reason) if name in self._donors:
                actions += self._lose(name, reason)
            case _:
                return []  # from a donor that was dropped
        if not self._open:
            self._ended = True
            return [*actions, Finished()]
        if not self._donors:
            self._ended = True
            return [*actions, Failed(f"no donor is left; the last one: {self._last_loss}")]
        return actions + self._ask(now)

    def _arrived(self, donor: _Donor, piece: Piece, intact: bool) -> list[Action]:
        asked = donor.flying.pop(piece, None) is not None
        was_late = piece in donor.late
        donor.late.discard(piece)
        if not asked or piece not in self._open:
            return []
        if intact:
            self._open.discard(piece)
            donor.kept_bytes += piece.nbytes
            self._kept_from[donor.name] += piece.nbytes
            return [Keep(donor.name, piece)]
        donor.spoilt += 1
        if not was_late:
            self._ask_again(piece, donor, Again.CHECKSUM)
        if donor.strikes >= self.rules.strikes:
            return self._lose(donor.name, f"{donor.strikes} pieces were spoilt or late")
        return []

    def _late(self, now: float) -> list[Action]:
        """Ask elsewhere for what has been flying too long; its first answer still counts."""
        actions: list[Action] = []
        for donor in list(self._donors.values()):
            for piece, since in list(donor.flying.items()):
                if now - since < self.rules.request_timeout_s or donor.name not in self._donors:
                    continue
                if now - max(since, donor.heard) >= self.rules.request_timeout_s:
                    donor.silent += 1
                    donor.flying[piece] = now  # its next strike is a whole timeout away
                if donor.strikes >= self.rules.strikes:
                    actions += self._lose(donor.name, f"{donor.strikes} pieces were spoilt or late")
                elif piece not in donor.late and len(self._donors) > 1 and piece in self._open:
                    donor.late.add(piece)
                    self._ask_again(piece, donor, Again.SLOW)
        return actions

    def _lose(self, name: str, reason: str) -> list[Action]:
        donor = self._donors.pop(name)
        self._last_loss = f"{name}: {reason}"
        for piece in donor.flying:
            if piece in self._open and piece not in donor.late:
                self._ask_again(piece, donor, Again.DONOR_LOST)
        for piece in donor.queue:
            if self._donors:
                self._least_loaded().queue.append(piece)
        return [Drop(name, reason)]

    def _ask_again(self, piece: Piece, donor: _Donor, why: Again) -> None:
        """First in the queue of the least loaded other donor; of the same one if it is alone."""
        self.retried[why.value] = self.retried.get(why.value, 0) + 1
        if self._donors:
            self._least_loaded(but=donor.name).queue.appendleft(piece)

    def _least_loaded(self, but: str = "") -> _Donor:
        others = [d for d in self._donors.values() if d.name != but] or list(self._donors.values())
        return min(others, key=_Donor.rest_bytes)

    def _ask(self, now: float) -> list[Action]:
        """Fill up what each donor may have in flight, from its own queue or, when that is empty, a slow one's."""
        asks: list[Action] = []
        for donor in self._donors.values():
            while len(donor.flying) < self.rules.in_flight:
                piece = self._next_for(donor, now)
                if piece is None:
                    break
                donor.flying[piece] = now
                donor.began = now if donor.began is None else donor.began
                asks.append(Ask(donor.name, piece))
        return asks

    def _next_for(self, donor: _Donor, now: float) -> Piece | None:
        while donor.queue:
            piece = donor.queue.popleft()
            if piece in self._open and piece not in donor.flying:
                return piece
            if piece in self._open:  # spoilt, and this donor is the only one to ask again
                donor.queue.appendleft(piece)
                return None
        slow = [d for d in self._donors.values() if d.queue and d.rest_s(now, self.rules.patience_s) > self.rules.patience_s]
        while slow:
            slowest = max(slow, key=lambda d: d.rest_s(now, self.rules.patience_s))
            piece = slowest.queue.pop()
            if piece in self._open and piece not in donor.flying:
                return piece
            if not slowest.queue:
                slow.remove(slowest)
        return None
