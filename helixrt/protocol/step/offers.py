"""Which snapshots a healthy replica offers to those that are behind.

In: the members of a quorum and its assessment. Out: `Offer` and `Withdraw`. A snapshot that is being fetched is kept; one
that is not for a few quorums more (a replica that fetches it may have missed one), unless its memory is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from helixrt.protocol.step.following import may_offer
from helixrt.protocol.step.messages import Action, Offer, Withdraw
from helixrt.protocol.step.quorum import Assessment, Member, StepRules

IDLE_QUORUMS = 3  # in a row in which no replica fetches it, after which a snapshot is withdrawn


class Offers:
    """Of one replica."""

    def __init__(self, replica: int, rules: StepRules) -> None:
        self._replica, self._rules = replica, rules
        self._idle: dict[str, int] = {}  # lineage of an offered snapshot -> quorums in a row in which no replica fetched it

    def serve(self, held: str, members: Sequence[Member], assessment: Assessment) -> list[Action]:
        """Healthy replicas offer the base, the state `held`, when a replica that is behind has no fetch under way."""
        if not assessment.behind and not self._idle:
            return []
        behind = [m for m in members if m.replica in assessment.behind]
        needed = {m.fetching for m in behind if m.fetching}
        asked = any(not m.fetching for m in behind) and may_offer(members, assessment, self._rules)
        if self._replica in assessment.healthy and asked:
            needed.add(assessment.base.hash)
        mine = {assessment.base.hash} if held == assessment.base.hash else set()
        new = (needed & mine) - set(self._idle)
        kept = {h: 0 for h in self._idle if h in needed}
        room = self._rules.snapshots - len(kept) - len(new)
        spare = {h: idle + 1 for h, idle in self._idle.items() if h not in needed and idle < IDLE_QUORUMS}
        kept |= dict(sorted(spare.items(), key=lambda item: item[1])[: max(0, room)])
        actions: list[Action] = [Withdraw(h) for h in sorted(set(self._idle) - set(kept))]
        self._idle = kept | dict.fromkeys(new, 0)
        return actions + [Offer(h) for h in sorted(new)]
