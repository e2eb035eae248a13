"""What has been received: every sequence number is taken once, whatever rails do.

In: sequence numbers in any order, some of them again. Out: whether each is new; and the counters that a
fallback handshake exchanges (SHIFT section 4.3.2).
"""

from __future__ import annotations

from helixrt.protocol.link.frames import MAX_RANGES


class Ledger:
    """Numbers from 1. `floor`: all up to it are taken; `above`: those taken beyond it."""

    def __init__(self) -> None:
        self.floor = 0
        self.above: set[int] = set()

    def __contains__(self, sequence: int) -> bool:
        return sequence <= self.floor or sequence in self.above

    def take(self, sequence: int) -> bool:
        """Enter `sequence`; False if it was there."""
        above = self.above
        if sequence == self.floor + 1:
            self.floor = sequence
            while above and self.floor + 1 in above:
                self.floor += 1
                above.remove(self.floor)
            return True
        if sequence in self:
            return False
        above.add(sequence)
        return True

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """`above` as closed ranges, growing and not touching; the first MAX_RANGES of them."""
        if not self.above:
            return ()
        found: list[tuple[int, int]] = []
        first = last = -1
        for sequence in sorted(self.above):
            if sequence != last + 1:
                if last >= 0:
                    found.append((first, last))
                first = sequence
            last = sequence
        found.append((first, last))
        return tuple(found[:MAX_RANGES])
