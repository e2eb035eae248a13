"""One knob, the whole lattice of timeouts.

Users set `step_timeout_s`: how long a healthy step may take before something counts as stuck.
Everything else is derived from it, and the order is checked: what detects must fire before what
would be detected by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.errors import ConfigError


@dataclass(frozen=True)
class Timeouts:
    """All in seconds. heartbeat_period < heartbeat < heartbeat_limit < exchange <= step < join < start."""

    heartbeat_period_s: float  # between two heartbeats of a replica
    heartbeat_s: float  # the membership beat: who does not run is left out of the quorum within 1.5 of it
    exchange_s: float  # one generation's exchange, connection included
    stall_s: float  # a fetch of state from peers, of which no byte comes
    step_s: float  # one step of a replica's ranks, from plan to vote
    join_s: float  # how long a quorum waits for a living replica that has not joined
    start_s: float  # from a process's start to its first join
    progress_period_s: float  # between two progress reports of a rank
    evaluate_s: float  # an evaluation, a digest of the state or a checkpoint's copy of it

    @property
    def heartbeat_limit_s(self) -> float:
        """Silent for longer: left out of the quorum. The rest of 1.5 beats is for noticing that a process does not run."""
        return 1.25 * self.heartbeat_s

    @property
    def link_period_s(self) -> float:
        """Of the liveness of links between replicas, unless it is set (`protocol/liveness.py`). A peer is lost within 1.5 of
        it, so links are given up before the membership is."""
        return self.heartbeat_s / 2


def derive(step_timeout_s: float, heartbeat_s: float = 0.0) -> Timeouts:
    """The lattice for one step timeout; `heartbeat_s` 0: derived. Raises ConfigError below 5 s: heartbeats need room."""
    if not step_timeout_s >= 5:
        raise ConfigError("step_timeout_s", step_timeout_s, "must be at least 5 seconds")
    if heartbeat_s and not 0.2 <= heartbeat_s <= step_timeout_s / 4:
        rule = f"must be 0.2 to a quarter of step_timeout_s={step_timeout_s:g}, or 0 to be derived from it"
        raise ConfigError("heartbeat_s", heartbeat_s, rule)
    heartbeat = heartbeat_s or min(2.0, step_timeout_s / 6)
    lattice = Timeouts(
        heartbeat_period_s=heartbeat / 10,
        heartbeat_s=heartbeat,
        exchange_s=step_timeout_s / 2,
        stall_s=step_timeout_s,
        step_s=step_timeout_s,
        join_s=2 * step_timeout_s,
        start_s=max(120.0, 3 * step_timeout_s),
        progress_period_s=min(2.0, step_timeout_s / 20),
        evaluate_s=max(120.0, 3 * step_timeout_s),
    )
    assert lattice.heartbeat_period_s < lattice.heartbeat_s < lattice.heartbeat_limit_s < lattice.exchange_s <= lattice.step_s
    assert lattice.step_s < lattice.join_s < lattice.start_s
    assert lattice.progress_period_s < lattice.step_s < lattice.evaluate_s
    return lattice
