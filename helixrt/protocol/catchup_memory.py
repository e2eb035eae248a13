"""How many reduced sets and snapshots fit into the memory that a rank may use for catch-up.

In: the memory, the sizes of one reduced set (the sums of all gradient buckets of this rank) and of one snapshot of its
state. Out: how many reduced sets it may keep for replay, and how many snapshots it may offer at a time. What counts:

- every rank offers the reduced sets of its newest `SERVED` updates;
- a rank that is behind holds the state that it fetches, and one reduced set for each step since that state;
- a donor holds a snapshot for each state that others fetch.

A rank is behind or a donor, not both, so the larger of the two has to fit. Pure: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.errors import ConfigError

SERVED = 2  # reduced sets that are always offered; see `ReducedSets`
KEY = "catchup.memory_gb"
GB = 1 << 30


@dataclass(frozen=True)
class CatchupMemory:
    """`replay`: reduced sets that a replica that is behind may keep. `snapshots`: states that a donor may offer at once."""

    replay: int
    snapshots: int


def required_bytes(replay: int, snapshots: int, reduced_bytes: int, state_bytes: int) -> int:
    """What a rank holds at most with these limits, as a replica that is behind or as a donor."""
    behind = (SERVED + replay) * reduced_bytes + state_bytes
    donor = SERVED * reduced_bytes + snapshots * state_bytes
    return max(behind, donor)


def catchup_memory(memory_bytes: int, reduced_bytes: int, state_bytes: int, replicas: int, replay_limit: int) -> CatchupMemory:
    """The most that fits into `memory_bytes`: `replay` is at most `replay_limit`, `snapshots` at most one per other replica.

    At least one reduced set (after a broken exchange one is fetched and replayed) and one snapshot. A `replay_limit` of 0
    needs no room for replay. With one replica there is no catch-up, and nothing has to fit. Raises ConfigError
    (catchup.memory_gb) when less than that fits; it gives the value that would do.
    """
    assert min(reduced_bytes, state_bytes, replay_limit) >= 0 and replicas >= 1
    if replicas == 1:
        return CatchupMemory(0, 1)
    least = required_bytes(min(1, replay_limit), 1, reduced_bytes, state_bytes)
    if memory_bytes < least:
        # Rounded up, so that the value in the message is enough.
        wanted = -(-least * 1000 // GB) / 1000
        rule = (
            f"must be at least {wanted:.3f}: a rank that is behind holds one state ({state_bytes / GB:.3f} GiB)"
            f" and {SERVED + min(1, replay_limit)} reduced gradient sets ({reduced_bytes / GB:.3f} GiB each)"
        )
        raise ConfigError(KEY, f"{memory_bytes / GB:g}", rule)
    spare = memory_bytes - SERVED * reduced_bytes
    replay = replay_limit if not reduced_bytes else min(replay_limit, (spare - state_bytes) // reduced_bytes)
    snapshots = replicas - 1 if not state_bytes else max(1, min(replicas - 1, spare // state_bytes))
    return CatchupMemory(replay, snapshots)
