"""How long a caller that waits looks for news itself before it sleeps.

Polling costs processor time that others may need; sleeping costs a wake-up of tens of microseconds. Polling pays
where the peer runs on a processor of its own, and is a loss where ranks share processors: then the very
one it waits for may be kept from running. Which of the two holds shows in the looks themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRUST = 8  # looks in vain, beyond those that paid, until there are no more
_RETRY = 64  # waits without one until the next


@dataclass(frozen=True)
class Patience:
    """How long the drivers look before they sleep, in seconds."""

    spin_s: float = 50e-6  # a waiting caller polls at most that long after the last thing that happened
    park_s: float = 5e-3  # the thread leaves driving to callers that long after one was there


class Spin:
    """Decides at every wait. In: whether the last look paid. Out: how long the next one may take."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._trust, self._skipped = longest_s, _TRUST, 0

    def allowance(self) -> float:
        """Seconds for a look that begins now; 0: sleep at once."""
        if self._trust > 0:
            return self._longest_s
        self._skipped += 1
        if self._skipped < _RETRY:
            return 0.0
        self._skipped = 0
        return self._longest_s

    def paid(self) -> None:
        """Something happened during a look."""
        self._trust = min(_TRUST, self._trust + 1)

    def in_vain(self) -> None:
        """A look ended in sleep."""
        self._trust = max(0, self._trust - 1)
