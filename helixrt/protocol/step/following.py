"""How a replica that is behind gets the state of the others: what it fetches, keeps and replays.

In: the log, the state held, quorums, and fetches that end. Out: actions, and the lineage hash held after them.

While a state is fetched, the reduced buckets of the steps since are kept (at most `replay` sets); when it is
there, they are replayed. A fetch that the others outrun by more is thrown away and counted as
`overtaken`; after `StepRules.overtaken` of them the others wait once (`quorum.Assessment.hold`). Records
that were not applied need no buckets. Part of `StepMachine`; FT-HSDP section 4.3.
Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.protocol.step.messages import Action, Fetched, FetchFailed, FetchReduced, FetchState, Forget, Load, Replay
from helixrt.protocol.step.quorum import Assessment, Member, StepRules


class Following:
    """One replica's catch-up. Fields are written here alone, but for `fetching`, which a repair begins (`repair`)."""

    def __init__(self, log: Log, rules: StepRules) -> None:
        self.log, self.rules = log, rules
        self.fetching = ""  # lineage hash of the state or the reduced buckets under way
        self.kept: dict[str, CommitRecord] = {}  # reduced buckets kept for replay, by record hash
        self.overtaken = 0  # fetches thrown away because the others were faster, since this replica was last healthy
        self.held_since = 0  # generation at which the others began to wait for the fetch; 0: they have not
        self._refused = ""  # record whose reduced buckets no replica had: fetch the state instead

    def healthy(self) -> list[Action]:
        """This replica holds the base: nothing under way is needed."""
        self.overtaken = self.held_since = 0
        return self._end()

    def abandon(self) -> list[Action]:
        """Another state is read in place of what is under way, which is no state to load when it comes."""
        return self._end()

    def keep(self, record: CommitRecord) -> None:
        """The buckets of the exchange just done are kept for `record`."""
        self.kept[record.hash] = record

    def repair(self, record: CommitRecord) -> None:
        """The reduced buckets of `record`, which others committed, are being fetched."""
        self.fetching = record.hash
        self.kept[record.hash] = record

    def learned(self) -> list[Action]:
        """The log has new entries: drop what was kept and is not on the chain."""
        actions: list[Action] = []
        if not self.kept:
            return actions
        for stale in [h for h in self.kept if not self.log.on_chain(h)]:
            del self.kept[stale]
            actions.append(Forget(stale))
            if self.fetching == stale:
                self.fetching = ""  # its reduced buckets; when they come they are no state to load
        return actions

    def begin(self, held: str, me: Member, members: Sequence[Member], assessment: Assessment, generation: int) -> list[Action]:
        """Fetch what leads to the base, unless what is under way does."""
        base = assessment.base
        if assessment.hold == me.replica and not self.held_since:
            self.held_since = generation
        if held == base.hash or (self.fetching and self._replayable(self.fetching, base)):
            return []
        if self.fetching and len(self.kept) > self.rules.replay and self.log.on_chain(self.fetching):
            self.overtaken += 1
        actions = self._end()
        if me.fetching or not may_offer(members, assessment, self.rules):
            return actions  # our account named another fetch, or donors keep no more snapshots: at a later quorum
        donors = tuple(m for m in members if m.replica in assessment.healthy)
        self.fetching = base.hash
        if held and held == base.parent and self._refused != base.hash:
            self.kept[base.hash] = base
            return [*actions, FetchReduced(base.hash, donors)]
        return [*actions, FetchState(base.hash, donors)]

    def ended(self, event: Fetched | FetchFailed, held: str) -> tuple[str, list[Action]]:
        """A fetch ended: load what came and replay what was kept. Returns what is held then."""
        if isinstance(event, FetchFailed):
            self._refused, self.fetching = event.lineage, ""  # it has ended, and may be begun again at once
            return held, self._end()
        actions: list[Action] = []
        self.fetching = ""
        if event.lineage not in self.kept:
            actions.append(Load(event.lineage))
            held = event.lineage
        held, replays = self.replay(held)
        return held, actions + replays

    def replay(self, held: str) -> tuple[str, list[Action]]:
        """Follow the chain from the state held through what needs no fetch. Returns what is held then."""
        actions: list[Action] = []
        while (following := self.log.after(held)) is not None:
            if following.deal != self.rules.deal:
                break  # of before the data was dealt over other streams: the run goes on from what is held
            if self.kept.pop(following.hash, None) is None and following.applied:
                break
            actions.append(Replay(following))
            held = following.hash
        return held, actions

    def _end(self) -> list[Action]:
        actions: list[Action] = [Forget(h) for h in sorted({*self.kept, self.fetching} - {""})]
        self.kept.clear()
        self.fetching = ""
        return actions

    def _replayable(self, start: str, base: CommitRecord) -> bool:
        """Whether kept buckets lead from `start` (or from our state) to `base` along the chain."""
        if not self.log.on_chain(start) or len(self.kept) > self.rules.replay:
            return False
        node: CommitRecord | None = base
        while node is not None and node.hash != start:
            if node.hash not in self.kept and node.applied:
                return False
            node = self.log.get(node.parent)
        return node is not None


def may_offer(members: Sequence[Member], assessment: Assessment, rules: StepRules) -> bool:
    """Whether donors may begin a snapshot of the base, beside those that are being fetched. All members decide the same."""
    behind = [m for m in members if m.replica in assessment.behind]
    under_way = {m.fetching for m in behind if m.fetching} | {assessment.base.hash}
    return len(under_way) <= rules.snapshots
