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
    """All in seconds. heartbeat_period < heartbeat < exchange <= step < join < start."""

    heartbeat_period_s: float  # between two heartbeats of a replica
    heartbeat_s: float  # silent for longer: left out of the quorum
    exchange_s: float  # one generation's exchange, connection included
    stall_s: float  # a fetch of state from peers, of which no byte comes
    step_s: float  # one step of a replica's ranks, from plan to vote
    join_s: float  # how long a quorum waits for a living replica that has not joined
    start_s: float  # from a process's start to its first join
    progress_period_s: float  # between two progress reports of a rank
    evaluate_s: float  # an evaluation, a digest of the state or a checkpoint's copy of it


def derive(step_timeout_s: float) -> Timeouts:
    """The lattice for one step timeout. Raises ConfigError below 5 s: heartbeats need room."""
    if not step_timeout_s >= 5:
        raise ConfigError("step_timeout_s", step_timeout_s, "must be at least 5 seconds")
    heartbeat = min(3.0, step_timeout_s / 4)
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
    assert lattice.heartbeat_period_s < lattice.heartbeat_s < lattice.exchange_s <= lattice.step_s
    assert lattice.step_s < lattice.join_s < lattice.start_s
    assert lattice.progress_period_s < lattice.step_s < lattice.evaluate_s
    return lattice
