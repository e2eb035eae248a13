"""The keys of the run's store by which ranks and the controller tell each other where they are.

The leader reports that its replica runs and that it is done; the driver reports when all may exit.
Every key but those of a rank's progress is put once and never changed (`RunStore`); a new driver begins with an empty store.
"""

from __future__ import annotations

from enum import Enum

PLAN_KEY = "plan"  # as JSON, where the ranks decide it: how far the run goes, batches of a step, a pipeline's first order
DIVERGED_KEY = "diverged"  # put by a leader, before its replica ends so (`job.divergence`)
EXIT_KEY = "exit"  # put by the driver: every replica that was not given up is done, ranks may exit


class OfRank(Enum):
    """What ranks put for the other ranks of their incarnation, which alone read it. `life` names the incarnation, as
    `RankContext.life`."""

    ADDRESS = "address"  # where others fetch from the rank
    GENESIS = "genesis"  # digest of its initial state
    SESSION = "initial/digest"  # the same, of a session's
    MEMORY = "memory"  # what fits into its memory for catch-up
    MONITOR = "monitor"  # address of its monitor
    LEFT = "checkpoint/left"  # set again and again: what it has not taken of the checkpoint that it loaded last
    STATE = "state"  # at an error of its program: hash of the record whose state it holds, or "none"
    LAST = "checkpoint/last"  # then, of the leading rank: the record whose state all ranks save, as JSON, or "none"
    SAVED = "checkpoint/saved"  # then: it needs the others no more for the checkpoint of that state
    PID = "pid"  # of its process, in a run with faults

    def key(self, life: str, rank: int) -> str:
        return f"{self.value}/{life}/{rank}"


def ready_key(replica: int) -> str:
    """Put by the replica's leader when it can begin its first step, and by the driver when it has given the replica up: the
    first quorum no longer waits for it."""
    return f"ready/{replica}"


def given_up_key(replica: int) -> str:
    """Put by the driver, with the reason: the replica is not started again in this life of the run."""
    return f"given_up/{replica}"


def running_key(replica: int, incarnation: int) -> str:
    """Put by the replica's leader when this incarnation has joined a quorum for the first time."""
    return f"running/{replica}/{incarnation}"


def asks_key(replica: int, incarnation: int) -> str:
    """Put by the replica's leader before this incarnation asks torchft's lighthouse for its first quorum."""
    return f"asks/{replica}/{incarnation}"


def done_key(replica: int) -> str:
    """Put by the replica's leader after its last step, with everything it had to write written."""
    return f"done/{replica}"


def progress_key(rank: str, incarnation: int) -> str:
    """Set again and again by the rank (named by its coordinate): its newest `ProgressReport`."""
    return f"progress/{rank}/{incarnation}"


def working_key(rank: str, incarnation: int) -> str:
    """Set by the rank, where it has no page for it: what `work_page.WorkPage.said` would give."""
    return f"working/{rank}/{incarnation}"


SERVED_KEY = "served/run"  # put by `helixrt serve`: which run it is, as JSON
CLOSED_KEY = "served/closed"  # put by `helixrt serve`: the run is over, no replica may join any more


def claim_key(replica: int, incarnation: int) -> str:
    """Put by group rank 0 of processes that were started from outside: they are this incarnation. Incarnations are claimed in
    their order. The value identifies the process and its start (`job.claims`)."""
    return f"served/claim/{replica}/{incarnation}"


def seat_key(replica: int, incarnation: int, rank: int) -> str:
    """Put by another process of the same start: it is this group rank of the incarnation. The value identifies the process."""
    return f"served/seat/{replica}/{incarnation}/{rank}"


def formed_key(replica: int, incarnation: int) -> str:
    """Put by the process that claimed the incarnation, when all ranks have come: who they are, as JSON."""
    return f"served/formed/{replica}/{incarnation}"


def spec_key(replica: int, incarnation: int, rank: int) -> str:
    """Put by `helixrt serve` when a formed incarnation may begin: the `RankSpec` of this group rank as JSON, without the
    secret."""
    return f"served/spec/{replica}/{incarnation}/{rank}"


def tidied_key(replica: int) -> str:
    """Set by the driver of a run with a keeper: up to which incarnation it has deleted the keys of lives that are over."""
    return f"tidied/{replica}"


def kill_key(life: str) -> str:
    """Put by a rank of a run with faults: all ranks of its incarnation are to kill themselves."""
    return f"chaos/kill/{life}"


def exit_key(replica: int, incarnation: int, rank: int) -> str:
    """Put by a rank of a claimed incarnation when it ends in good order: its exit code and why, as JSON."""
    return f"served/exit/{replica}/{incarnation}/{rank}"


def order_key(order: str) -> str:
    """Put by a leader: the order of a schedule with this hash, as `schedule.exchange.as_json.order_text`."""
    return f"schedule/{order}"


def poison_key(replica: int, index: int) -> str:
    """Entry `index` of the list of batches of the replica's stream that are to be left out, put by the driver: the position."""
    return f"poison/{replica}/{index}"


def saves_key(replica: int, incarnation: int) -> str:
    """Put by the leader of a replica that leaves: its ranks write a checkpoint before they end."""
    return f"saves/{replica}/{incarnation}"


def saver_key(lineage: str) -> str:
    """Put where all replicas that hold this state leave: by the leader of the one that saves it for all of them."""
    return f"saver/{lineage}"


def ended_key(replica: int, incarnation: int) -> str:
    """Put by the driver when a process of this incarnation has ended too early, and by its own leader or that of its successor:
    it takes part no more. A rank reads its own before it puts records and, of several replicas, at every quorum, and stops if
    it is there."""
    return f"ended/{replica}/{incarnation}"


def leave_key(replica: int, incarnation: int) -> str:
    """Put by the driver when the user drains the replica, and by a rank that gets SIGTERM: this incarnation is to leave at its
    next step boundary. The value is the reason."""
    return f"leave/{replica}/{incarnation}"


def cause_key(replica: int, incarnation: int) -> str:
    """Put by the first rank of several whose own error ends the replica, before the others can know: its exit code, the reason
    and the error (`RankExit`), as JSON. Ranks that fail because of it may end first."""
    return f"cause/{replica}/{incarnation}"


def holder_key(index: int) -> str:
    """Entry `index` of the list of holder entries: an incarnation, and the lineage hash of a state that it will load."""
    return f"holders/{index}"


def waited_key(head: str, index: int) -> str:
    """Entry `index` of the counter of waiting for a holder of the record `head` (`protocol.step.supersede.Waited`)."""
    return f"waited/{head}/{index}"


def accepted_key(head: str) -> str:
    """Put by the driver: the user accepts that the record `head` is lost if no member holds it."""
    return f"accepted/{head}"
