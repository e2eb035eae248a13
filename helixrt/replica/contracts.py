"""The contracts that stand between one replica's life and the world.

`Engine` computes, `Membership` decides which replicas take part, `RunStore` keeps the run's log,
`StateTransport` moves state between replicas, `Launcher` starts and stops ranks. They are implemented
elsewhere (`engines/`, `job/`, `ray_cluster/`) but for the plain ones here, and injected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from helixrt.errors import Fatal
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.quorum import Member
from helixrt.replica.portions import Portion

Number = float | torch.Tensor  # a tensor has one element; it is read, with `float`, only where the number is logged
Scalar = bool | int | float | str | None  # what JSON has, but for containers


@dataclass(frozen=True)
class Update:
    """What one update did, for the log: gradient norm before clipping (over all ranks), learning rate used."""

    grad_norm: Number
    learning_rate: Number


@dataclass(frozen=True)
class WorkResult:
    """What the work on one batch gave, equal on every rank of the replica.

    `loss` is the mean over the replica's batch (nats per token in the built-in job); `tokens` is how many items it had.
    """

    loss: Number
    tokens: Number


@dataclass(frozen=True)
class State:
    """The replicated state of one rank: named tensors, which are live, and named scalars."""

    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)


class Engine(ABC):
    """What computes inside one rank of a replica: the pipeline, or any module. It knows no commands and no step protocol.

    One thread calls it: `begin`, the work on one batch, `end`, `apply`, again and again. A batch may be begun again without
    an update between (the work was dropped), and an update may come without a batch (this replica is behind). `state` and
    `load` come between `end` and the next `begin`; the tensors of `state` are read by other threads while no update runs.
    Gradients live in flat buckets that follow parameter order, never schedule order, so that a replica that has not computed
    knows their layout.
    """

    can_replay: bool = True
    """Whether `apply` may be called with kept sums of a step whose work this rank did not do."""

    expects_overflow: bool = False
    """Gradients overflow now and then where nothing is wrong: those of a gradient scaler, which lowers its scale then. A sum
    that is not finite is nobody's fault, and commits a record that is not applied."""

    @property
    @abstractmethod
    def buckets(self) -> Sequence[torch.Tensor]:
        """The flat local gradient sets of this rank, in a fixed layout. Empty layouts are allowed.

        Filled between `begin` and `end`; left alone from `end` to the next `begin` or `apply`.
        """

    def finite_part(self, bucket: int, values: torch.Tensor) -> torch.Tensor:
        """What of `values`, laid out as this bucket, must be finite: all but what may be infinite or NaN where every gradient
        is finite, such as buffers. It decides whether a sum counts, and whose gradient is to blame."""
        return values

    def ready(self, bucket: int) -> None:  # noqa: B027 in host memory there is nothing to wait for
        """Called by the thread that exchanges, before it reads a bucket that was handed out: makes the thread's current
        stream wait for what computes the bucket."""

    @abstractmethod
    def begin(self, on_bucket: Callable[[int], None]) -> None:
        """The work on one batch begins: discard the gradients of the batch before.

        `on_bucket(i)` is to be called as soon as bucket i has its final value: each i exactly once, by `end` at the latest,
        from any thread, in an order that is the same on every replica. It never blocks and never raises.
        """

    @abstractmethod
    def end(self) -> WorkResult:
        """The batch is worked on. On return every bucket was handed out. Parameters were not touched."""

    @abstractmethod
    def apply(self, record: CommitRecord, reduced: Sequence[torch.Tensor] | None) -> Update | None:
        """Carry out the update of this commit record; `record.step` is its number (first is 1).

        `reduced` holds the sums over the replicas in `record.summed` of what their `buckets` held, in the same layout; it is
        not changed, but where it is `buckets` themselves, in a run of one replica. It is None when `record.applied` is False:
        then nobody's gradient counts, parameters stay as they are and the result is None. All ranks of the replica call it
        together (clipping needs the norm over all of them). The
        new state is a function of the old one, `record` and `reduced` alone, bit for bit: it is called at commit, at
        replay and at repair.
        """

    @abstractmethod
    def state(self) -> State:
        """The replicated state: parameters, optimizer and whatever else `apply` changes, in a fixed order.

        Where names, shapes and dtypes change (an optimizer that has no state before its first step), they change in `apply`
        and `load` alone.
        """

    def state_growth(self) -> int:
        """How many bytes `state` is expected to gain in the first update, such as those of an optimizer's moments."""
        return 0

    def leave_batch(self) -> None:
        """The batch that was begun is not worked on any more; gradients stay, since they may be on their way. `state` is that
        of the newest update then. Raises Fatal if it is not, or if that cannot be known."""
        raise Fatal("this engine cannot leave a batch that was begun")

    def check_copies(self) -> None:  # noqa: B027 an engine may hold nothing twice in a replica
        """Compare what must be equal on several ranks of this replica. Raises Fatal, with an entry's name, where their bits
        differ. All ranks of the replica call it at the same point, between two steps."""

    def portions(self) -> Mapping[str, Portion]:
        """How tensors of `state` lie in the state of the whole replica, by their names in `state`: what checkpoints are written
        by, so that ranks of another mesh can read them. What is left out is taken for this rank's own."""
        return {}

    @abstractmethod
    def load(self, state: State) -> None:
        """Take over a state that `state` of an equal rank gave. Everything must be there. Never steps an optimizer."""

    def resumed(self) -> str:
        """The state of a checkpoint of an earlier life of the run was loaded. A line for the user where the script asks for
        other settings than those of the checkpoint, else ""."""
        return ""

    def close(self) -> None:  # noqa: B027 an engine may have nothing to close
        """Give up threads and groups; idempotent."""


class BatchEngine(Engine):
    """An engine that finds its batches itself, by their position in this replica's stream."""

    @abstractmethod
    def compute(self, position: int) -> None:
        """Forward and backward of all micro-batches of the batch at `position`; between `begin` and `end`."""

    def run(self, position: int, on_bucket: Callable[[int], None]) -> WorkResult:
        """The work on the batch at `position`, from `begin` to `end`."""
        self.begin(on_bucket)
        self.compute(position)
        return self.end()

    @abstractmethod
    def evaluate(self, batches: int) -> tuple[float, int]:
        """Mean loss in nats per token over `batches` fixed validation batches, and the tokens counted."""


@dataclass(frozen=True)
class Formed:
    """A quorum that formed: its generation (grows with time in a run) and its members by replica id."""

    generation: int
    members: tuple[Member, ...]


class Membership(ABC):
    """Who takes part in a step. `join` blocks and is called by one thread at a time; the rest from any."""

    alone: bool = False
    """The run has one replica: `join` does not wait, and no other replica appends to the run's log."""

    @abstractmethod
    def announce(self) -> None:
        """Start the heartbeats of this replica; from then on others wait for its `join`."""

    @abstractmethod
    def join(self, me: Member, timeout_s: float) -> Formed:
        """Ask to take part in the next step; returns once a quorum with `me` has formed.

        Raises Retryable when none formed in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the heartbeat; idempotent. The others stop waiting for this replica."""


class RunStore(ABC):
    """The run's key-value store. Values are text; a key that was put with `put_if_absent` is never changed, but by a rule of
    its own that decides when it is over (`protocol.store_quorum`).

    Safe from any thread. Raises Retryable when the store cannot be reached.
    """

    @abstractmethod
    def put_if_absent(self, key: str, value: str) -> str:
        """Put `value` unless the key has one; returns what the key has now. Atomic: the first wins. Where it matters who that
        was, the value says who wrote it: a call may be carried out, and asked again because its answer was lost."""

    @abstractmethod
    def set(self, key: str, value: str) -> None:
        """Put or replace the value: for a key with one writer, of which only the newest value matters. It may be
        on its way still when this returns; a reader sees an old or a new value, never a part of one."""

    @abstractmethod
    def get(self, key: str) -> str | None:
        """The value, or None at once if there is none."""

    @abstractmethod
    def wait(self, key: str, timeout_s: float) -> str:
        """The value, as soon as there is one. Raises Retryable after `timeout_s`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a key that will not be read again (control messages of old steps)."""


@dataclass(frozen=True)
class Shard:
    """One tensor of a state, as raw bytes of a layout both sides know."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as str(torch.dtype) without "torch."
    nbytes: int


def layout_of(tensors: Mapping[str, torch.Tensor]) -> tuple[Shard, ...]:
    """The layout of a state, in its order."""
    return tuple(
        Shard(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.numel() * t.element_size())
        for name, t in tensors.items()
    )


@dataclass(frozen=True)
class FetchReport:
    """What a fetch moved: bytes in all and per donor address, shards asked again and why."""

    nbytes: int
    per_donor: Mapping[str, int]
    retried: Mapping[str, int] = field(default_factory=dict)  # reason (checksum | donor_lost) -> count
    seconds: float = 0.0


class StateTransport(ABC):
    """Serves this rank's state to equal ranks of other replicas, and fetches theirs.

    What is offered is a named set of tensors that does not change while offered (a snapshot, or
    the kept reduced buckets). Serving happens on threads of the transport; training goes on.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """Where other replicas find what this rank offers; travels in `Member.addresses`."""

    @abstractmethod
    def offer(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Serve these tensors under `name` until `withdraw`; the caller no longer changes them. No copy is made of
        contiguous tensors in host memory."""

    @abstractmethod
    def offers(self, name: str) -> bool:
        """Whether `name` is offered now."""

    @abstractmethod
    def withdraw(self, name: str) -> None:
        """Stop serving `name`; idempotent. The tensors may be changed afterwards: a transfer that has begun then fails at
        the other side, which never takes bytes that were not offered."""

    @abstractmethod
    def layout(self, name: str, donors: Sequence[str], wait_s: float) -> tuple[Shard, ...]:
        """The layout of what the donors (addresses) offer under `name`: the first donor that answers gives it.

        A state's layout changes with its optimizers' first step, so who is behind does not know it. The answer is at most
        `manifest.LAYOUT_LIMIT_BYTES` long; names are distinct, dtypes known, sizes follow from shapes and dtypes. The caller
        compares it with what was agreed, and its size with its memory, before it allocates. A donor has `wait_s` to answer.
        Raises Retryable when none gave a layout.
        """

    @abstractmethod
    def fetch(
        self,
        name: str,
        layout: Sequence[Shard],
        donors: Sequence[str],
        stall_s: float,
        on_shard: Callable[[Shard, str, bool], None] = lambda shard, donor, ok: None,
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        """Fetch what the donors (addresses) offer under `name`, different shards from different donors.

        Sizes come from `layout`, never from the peer. A wrong checksum or a lost donor has the shard
        asked again from another. Raises Retryable when no donor is left, or when no byte has come for `stall_s`: a
        fetch has no deadline as long as bytes come. What `on_shard` raises ends the fetch, and is raised.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop serving; idempotent."""


@dataclass(frozen=True)
class Coordinate:
    """A rank's place in the mesh `replicas x pp x dp_shard x cp x tp`."""

    replica: int
    pp: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return f"r{self.replica}.pp{self.pp}.dp{self.dp_shard}.cp{self.cp}.tp{self.tp}"


@dataclass(frozen=True)
class RankSpec:
    """The settings of a rank's process at its start. Plain data: sent as JSON or through Ray.

    `store` is the `host:port` of torch's store, by which ranks meet, `durable` that of the run's store where it is another one
    (""), which outlives its process; `lighthouse` the address of the membership
    service ("" when there is one replica), `config` the resolved configuration as plain containers,
    `run_epoch_s` the Unix time the run first began (generations count from it), `life` how often the run
    was resumed, `incarnation` how often this replica was started before in this life of the run,
    `output` the run's folder, `secret` the run's secret,
    `transport` how state is fetched from peers: "http", or "ray" when ranks are Ray actors; `work_page`: where the rank says
    which batch it works on (`work_page.WorkPage.path`), "" in the run's store.
    """

    run: str
    coordinate: Coordinate
    incarnation: int
    store: str
    lighthouse: str
    output: str
    secret: str
    run_epoch_s: float
    config: dict[str, Any]
    transport: str = "http"
    life: int = 0
    durable: str = ""
    work_page: str = ""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> RankSpec:
        return RankSpec(**{**raw, "coordinate": Coordinate(**raw["coordinate"])})


@dataclass(frozen=True)
class RankExit:
    """A rank that ended: `code` is its exit status, negative for a signal (as in subprocess). `error` is the same for the same
    error at the same place of the program, "" if it is not known; `host`: where the rank ran, "" for the launcher's host."""

    coordinate: Coordinate
    incarnation: int
    code: int
    reason: str
    error: str = ""
    host: str = ""


class Launcher(ABC):
    """Starts and stops ranks. Every call is idempotent and returns without waiting for training."""

    @abstractmethod
    def start(self, spec: RankSpec) -> None:
        """Start the rank's process, unless that (coordinate, incarnation) was started already."""

    @abstractmethod
    def poll(self) -> list[RankExit]:
        """The ranks that ended since the last call."""

    outlives_driver: bool = False
    """Whether the ranks go on, for a while, when the process that calls this ends without `close`."""

    told_to_end: bool = False
    """Whether the process that has the ranks, if it is another than the one that calls this, was told to end by a signal."""

    awaits: str = "no resources yet for its ranks"
    """What a replica that is `waiting` waits for, as text for the user."""

    def working_on(self, rank: str, incarnation: int) -> str | None:
        """What the rank, named by its coordinate, has said in its page (`work_page.WorkPage.said`), until a later incarnation
        of it is started. None: it has none here, and may have said it in the run's store."""
        return None

    def waiting(self, replica: int) -> bool:
        """Whether a rank of the replica that was started has no process yet, for a reason that is not its own."""
        return False

    def leaving(self) -> None:  # noqa: B027 nothing to do where the ranks end with this process
        """All replicas were asked to leave, and none is started any more. If `outlives_driver`, they may complete that also
        when this process ends without `close`. May raise Retryable."""

    @abstractmethod
    def kill(self, replica: int) -> None:
        """End every process of a replica at once (SIGKILL); they are reported by `poll` as well."""

    @abstractmethod
    def close(self) -> None:
        """End every process that was started, and wait until they are gone."""
