"""The collectives a communicator offers, on flat tensors: picks the plan, submits it.

In: flat contiguous tensors of one element type (`memory.flat`), the same lengths on all ranks; those on a card are staged
(`staging`). Out: handles. A call is in place when source and result share memory, the shorter being its own part of the
longer; any other overlap is refused with ValueError. Which algorithm serves a call is `protocol/algorithms/choice.py`'s;
a plan is built once per shape and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from helixrt.collectives.communicator import Communicator
from helixrt.collectives.execution import Wire
from helixrt.collectives.handle import Handle, finished
from helixrt.collectives.memory import lies_at, overlap
from helixrt.collectives.native_communicator import NativeCommunicator
from helixrt.collectives.reduction import Op, Reduction
from helixrt.collectives.staged_operation import StagedOperation
from helixrt.collectives.staging import Staging
from helixrt.errors import Cause
from helixrt.protocol.calls import fingerprint
from helixrt.protocol.collective.algorithms import choice, direct
from helixrt.protocol.collective.plan import Plan

AnyCommunicator = Communicator | NativeCommunicator  # until the native one has all that the other has

_MOST_PLANS = 256
_BOUNDARY = 16  # bytes; kernels depend on addresses modulo this
_NO_REDUCTION = Reduction(Op.SUM)
_NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class How:
    """How a call runs: its software deadline, what runs before its result is reported, and whether the caller waits
    for it at once (and so drives it)."""

    timeout_s: float
    finish: Callable[[], None] | None = None
    waits: bool = False


class Collectives:
    """The operations of one communicator."""

    def __init__(self, communicator: AnyCommunicator, staging: Staging | None = None) -> None:
        self.communicator, self.tuning = communicator, communicator.tuning
        self._staging = staging or Staging()
        self._plans: dict[Hashable, Plan] = {}
        self._calls: dict[Hashable, int] = {}  # fingerprints, for one number of ranks
        self._compiled: dict[Hashable, Plan] = {}  # plans whose kernels are, by what these depend on
        self._counts: dict[tuple[bool, int, int], int] = {}  # (sent, peer, tag) -> messages so far
        self._generation = communicator.generation

    # ---------------------------------------------------------------- reductions

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, reduction: Reduction, how: How) -> Handle:
        """OUT = the reduction over all ranks' `source`."""
        in_place = self._in_place(source, out)
        if self.communicator.size == 1:
            return self._alone(source, out, reduction, how)
        length, element = _bytes(out), out.element_size()
        on_arrival = not self._staging.serves(out)  # what is on a card is summed there
        plan = self._plan(
            ("all-reduce", length, element, in_place, on_arrival),
            lambda rank, size: choice.all_reduce(rank, size, length, element, self.tuning, in_place, on_arrival),
        )
        return self._submit(plan, source, out, reduction, how, self._call("all-reduce", out, length, reduction))

    def reduce_scatter(
        self, source: torch.Tensor, out: torch.Tensor, counts: Sequence[int], reduction: Reduction, how: How
    ) -> Handle:
        """`source`: `counts[r]` elements for each rank r. OUT = this rank's, reduced over all ranks."""
        element = out.element_size()
        in_place = self._in_place(out, source, sum(counts[: self.communicator.rank]) * element)
        if self.communicator.size == 1:
            return self._alone(source, out, reduction, how)
        lengths = tuple(count * element for count in counts)
        on_arrival = not self._staging.serves(out)
        plan = self._plan(
            ("reduce-scatter", lengths, element, in_place, on_arrival),
            lambda rank, size: choice.reduce_scatter(rank, lengths, element, self.tuning, in_place, on_arrival),
        )
        return self._submit(plan, source, out, reduction, how, self._call("reduce-scatter", out, lengths, reduction))

    def reduce(self, source: torch.Tensor, out: torch.Tensor, root: int, reduction: Reduction, how: How) -> Handle:
        """`root`'s OUT = the reduction over all ranks' `source`; the others' is not touched."""
        in_place = self._in_place(source, out)
        if self.communicator.size == 1:
            return self._alone(source, out, reduction, how)
        length, element = _bytes(source), source.element_size()
        plan = self._plan(
            ("reduce", root, length, element, in_place),
            lambda rank, size: choice.reduce(rank, size, root, length, element, self.tuning, in_place),
        )
        return self._submit(plan, source, out, reduction, how, self._call("reduce", source, (root, length), reduction))

    def _alone(self, source: torch.Tensor, out: torch.Tensor, reduction: Reduction, how: How) -> Handle:
        """Of one rank there is nothing to exchange, but what follows a reduction remains."""
        if (refusal := self.communicator.refusal()) is not None:
            return finished(refusal)
        with torch.no_grad():
            reduction.alone(source, out)
            if how.finish is not None:
                how.finish()
        return finished()

    # ---------------------------------------------------------------- moving data

    def all_gather(self, source: torch.Tensor, out: torch.Tensor, counts: Sequence[int], how: How) -> Handle:
        """OUT = all ranks' `source`, `counts[r]` elements of rank r, one behind the other."""
        element = out.element_size()
        in_place = self._in_place(source, out, sum(counts[: self.communicator.rank]) * element)
        lengths = tuple(count * element for count in counts)
        plan = self._plan(
            ("all-gather", lengths, element, in_place),
            lambda rank, size: choice.all_gather(rank, lengths, element, self.tuning, in_place),
        )
        return self._submit(plan, source, out, _NO_REDUCTION, how, self._call("all-gather", out, lengths))

    def broadcast(self, tensor: torch.Tensor, root: int, how: How) -> Handle:
        """Everyone's `tensor` = `root`'s."""
        length, element = _bytes(tensor), tensor.element_size()
        plan = self._plan(
            ("broadcast", root, length, element),
            lambda rank, size: choice.broadcast(rank, size, root, length, element, self.tuning, in_place=True),
        )
        return self._submit(plan, tensor, tensor, _NO_REDUCTION, how, self._call("broadcast", tensor, (root, length)))

    def gather(self, source: torch.Tensor, out: torch.Tensor, root: int, counts: Sequence[int], how: How) -> Handle:
        """`root`'s OUT = all ranks' `source`, `counts[r]` elements of rank r."""
        element = source.element_size()
        in_place = self._in_place(source, out, sum(counts[:root]) * element)
        lengths = tuple(count * element for count in counts)
        plan = self._plan(
            ("gather", root, lengths, element, in_place),
            lambda rank, size: direct.gather(rank, root, lengths, element, self.tuning, in_place),
        )
        return self._submit(plan, source, out, _NO_REDUCTION, how, self._call("gather", source, (root, lengths)))

    def scatter(self, source: torch.Tensor, out: torch.Tensor, root: int, counts: Sequence[int], how: How) -> Handle:
        """OUT = this rank's `counts[rank]` elements of `root`'s `source`."""
        element = out.element_size()
        in_place = self._in_place(out, source, sum(counts[:root]) * element)
        lengths = tuple(count * element for count in counts)
        plan = self._plan(
            ("scatter", root, lengths, element, in_place),
            lambda rank, size: direct.scatter(rank, root, lengths, element, self.tuning, in_place),
        )
        return self._submit(plan, source, out, _NO_REDUCTION, how, self._call("scatter", out, (root, lengths)))

    def all_to_all(
        self, source: torch.Tensor, out: torch.Tensor, sends: Sequence[int], receives: Sequence[int], how: How
    ) -> Handle:
        """`sends[r]` elements of `source` go to rank r, `receives[r]` elements of OUT come from it; never in place."""
        if overlap(source, out):
            raise ValueError("source and result of an all-to-all overlap: give a copy of one")
        element = out.element_size()
        given, taken = tuple(n * element for n in sends), tuple(n * element for n in receives)
        plan = self._plan(
            ("all-to-all", given, taken, element),
            lambda rank, size: direct.all_to_all(rank, given, taken, element, self.tuning),
        )
        return self._submit(plan, source, out, _NO_REDUCTION, how, self._call("all-to-all", out))

    def barrier(self, how: How) -> Handle:
        """Done when all ranks have come."""
        plan = self._plan(("barrier",), direct.barrier)
        return self._submit(plan, _NOTHING, _NOTHING, _NO_REDUCTION, how, self._call("barrier", _NOTHING))

    # ---------------------------------------------------------------- point to point

    def send(self, tensor: torch.Tensor, peer: int, tag: int, how: How) -> Handle:
        """To `peer`'s `receive` with the same tag; those of one tag match in their order."""
        length, element = _bytes(tensor), tensor.element_size()
        plan = self._plan(
            ("send", peer, length, element), lambda rank, size: direct.send_to(peer, length, element, self.tuning)
        )
        wire = self._wire(True, peer, tag, len(plan.nodes))
        return self._submit(plan, tensor, tensor, _NO_REDUCTION, how, wire=wire)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, how: How) -> Handle:
        length, element = _bytes(tensor), tensor.element_size()
        plan = self._plan(
            ("receive", peer, length, element), lambda rank, size: direct.receive_from(peer, length, element, self.tuning)
        )
        wire = self._wire(False, peer, tag, len(plan.nodes))
        return self._submit(plan, tensor, tensor, _NO_REDUCTION, how, wire=wire)

    def _wire(self, sent: bool, peer: int, tag: int, messages: int) -> Wire:
        self._renew()
        if tag < 0:
            raise ValueError(f"tag {tag}: must not be negative")
        key = (sent, peer, tag)
        first = self._counts.get(key, 0)
        self._counts[key] = first + messages
        return Wire(-1 - tag, first)

    # ---------------------------------------------------------------- plans

    def _in_place(self, part: torch.Tensor, whole: torch.Tensor, offset: int = 0) -> bool:
        """Whether the plan must be one for a call in place: `part` is the memory `offset` bytes into `whole`.

        Staged calls never are: on the host their memory is apart, and on the card `Staged` keeps the order.
        """
        if part is not whole and not overlap(part, whole):
            return False
        if not lies_at(part, whole, offset):
            raise ValueError(
                f"source and result overlap, and the shorter is not {offset} bytes into the longer: give a copy of one"
            )
        return not self._staging.serves(whole)

    def _renew(self) -> None:
        """Plans belong to a rank and a size, counts to a generation."""
        if self._generation != self.communicator.generation:
            self._generation = self.communicator.generation
            self._plans.clear()
            self._calls.clear()
            self._compiled.clear()
            self._counts.clear()

    def _plan(self, key: Hashable, build: Callable[[int, int], Plan]) -> Plan:
        self._renew()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
                self._compiled.clear()
            plan = self._plans[key] = build(self.communicator.rank, self.communicator.size)
        return plan

    def _call(self, collective: str, tensor: torch.Tensor, agreed: Hashable = (), reduction: Reduction | None = None) -> int:
        """The fingerprint of a call. `agreed`: what must be equal on all ranks, besides the elements and the reduction."""
        op, divisor = (None, 1) if reduction is None else (reduction.op, reduction.divisor)
        key = (collective, tensor.dtype, op, divisor, agreed)
        found = self._calls.get(key)
        if found is None:
            if len(self._calls) >= _MOST_PLANS:
                self._calls.pop(next(iter(self._calls)))
            name = "" if op is None else "mean" if divisor != 1 else op.value
            dtype = "?" if tensor is _NOTHING else str(tensor.dtype).removeprefix("torch.")
            plan = (agreed, divisor, self.communicator.size, self.tuning)
            found = self._calls[key] = fingerprint(collective, dtype, name, plan)
        return found

    def _submit(
        self,
        plan: Plan,
        source: torch.Tensor,
        out: torch.Tensor,
        reduction: Reduction,
        how: How,
        call: int = 0,
        wire: Wire | None = None,
    ) -> Handle:
        submit = self.communicator.submit
        if not self._staging.serves(out) or self.communicator.size == 1:  # nothing to send: done where the tensors are
            return submit(plan, source, out, reduction, how.timeout_s, wire=wire, finish=how.finish, waits=how.waits, call=call)
        staged = self._stage(plan, source, out, reduction)
        return submit(
            plan,
            staged.source,
            staged.out,
            reduction,
            how.timeout_s,
            wire=wire,
            finish=lambda: staged.finish(how.finish),
            staged=staged,
            waits=how.waits,
            call=call,
        )

    def _stage(self, plan: Plan, source: torch.Tensor, out: torch.Tensor, reduction: Reduction) -> StagedOperation:
        """Also compiles the kernels it will launch: later that would be under the communicator's lock, while peers and
        heartbeats wait. Ends the generation if it cannot, as an operation that cannot begin does."""
        try:
            staged = StagedOperation(self._staging, plan, source, out)
            if reduction is not _NO_REDUCTION:
                addresses = tuple(each.data_ptr() % _BOUNDARY for each in (source, out, staged.source, staged.out))
                key = (id(plan), out.dtype, out.device, reduction.op, reduction.divisor != 1, addresses)
                if key not in self._compiled:
                    self._staging.compile(staged.variants(reduction), out.device)
                    self._compiled[key] = plan
            return staged
        except Exception as error:
            rank = self.communicator.rank
            self.communicator.abort(Cause(f"a collective could not begin: {error!r}", f"rank {rank}"))
            raise


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
