"""Buffers of modules: those that a forward changes, by their modes, and those that stay as they are.

A *running* buffer has a committed value, which is replicated state. A batch begins with it, changes the module's own tensor,
and the changed values travel in the exchange; at commit the committed value becomes

    "mean"   the mean over the contributors and their dp_shard ranks; of integers and booleans the maximum
    "first"  that of the lowest contributor's first rank

A batch that is begun again begins with the committed value again. Values need not be finite (an attention mask, a minimum so
far): whether gradients are is looked for elsewhere in the exchange. What the update does to any buffer is committed.

A "per_replica" buffer is each rank's own: `per_replica` has it for `job.per_replica`, and no state that replicas share does.

Modes are fixed at registration, because the layout of the exchange must be known to a replica that has computed nothing yet:
those of buffers that are named; of running statistics of torch's own modules, that of the run; of persistent integers with at
most `LARGEST_INTEGER` elements the maximum. Any other buffer is constant; one that changes outside the update raises, with its
name. Changes that count no version (by batch normalization, or through `data`) are found by the values: contributors tell in
the exchange how many elements of constant floating-point buffers are others than at the beginning. One element on one rank is
left to the digests that replicas compare, where there are several: it may be a memory error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from helixrt.engines.registered import Registered, Stateful, qualified
from helixrt.engines.samples import BITS
from helixrt.engines.tensor_plan import matches
from helixrt.errors import Fatal, MisuseError

Mode = Literal["mean", "first"]  # of a run's running statistics
MODES = ("mean", "first", "per_replica")  # of a buffer
LARGEST_INTEGER = 1 << 10
_NORM = next(base for base in nn.BatchNorm1d.__mro__ if issubclass(nn.InstanceNorm1d, base))  # torch's own, with statistics
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_LARGEST_COPY = 1 << 16  # elements; constant buffers with more are compared by the sum of their bits
_MOST_SLOT_BYTES = 256 << 20  # of values that travel once per replica


@dataclass(eq=False)
class _Buffer:
    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor  # the module's own, whatever stands in its place within a batch
    version: int  # of `tensor`, when it was last known to hold what it should
    mode: str = ""  # mean | first | per_replica, or max; "" of a constant one
    committed: torch.Tensor | None = None  # of a running one
    start: int = 0  # of a running one, among the elements of its kind
    seen: torch.Tensor | None = None  # of a constant one whose values are compared

    @property
    def integer(self) -> bool:
        return not (self.tensor.is_floating_point() or self.tensor.is_complex())

    @property
    def current(self) -> torch.Tensor | None:
        return getattr(self.owner, self.key, None)

    @property
    def changed(self) -> bool:
        return self.current is not self.tensor or self.tensor._version != self.version

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As an object whose state is per replica."""
        return {"values": getattr(self.owner, self.key).detach()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if (shape := state["values"].shape) != self.tensor.shape:
            raise Fatal(f"the per-replica state has buffer {self.name} of shape {list(shape)}, not {list(self.tensor.shape)}")
        self.tensor.copy_(state["values"])
        setattr(self.owner, self.key, self.tensor)


class Buffers:
    """All buffers of the registered models; one thread calls everything but `state`.

    `mode`: of running statistics. `changing`: the buffers that a forward changes, where that is known, by name, and whether
    they are running statistics of torch's own modules. Raises MisuseError for modes and names that are none, and for a buffer
    without a mode that a forward is known to change.
    """

    def __init__(
        self,
        registered: Registered,
        mode: Mode,
        replica: int,
        replicas: int,
        ranks: int = 1,
        changing: Mapping[str, bool] | None = None,
    ) -> None:
        if mode not in ("mean", "first"):
            raise MisuseError(f"buffers={mode!r}: must be 'mean' or 'first'")
        self._replica, self._replicas, self._ranks = replica, replicas, ranks
        every = dict(_find(registered))
        self.not_persistent = {buffer.name for buffer, persistent in every.items() if not persistent}  # in no state_dict
        named = modes_of(registered.buffers, [buffer.name for buffer in every], must_match=changing is None)
        for buffer, persistent in every.items():
            buffer.mode = named.get(buffer.name) or _mode_of(buffer, persistent, mode, changing)
            if buffer.mode in ("mean", "first") and buffer.tensor.is_complex():
                raise MisuseError(f"buffer {buffer.name} is complex: its mode can be 'per_replica' alone, not {buffer.mode!r}")
            if buffer.mode == "mean" and buffer.integer:
                buffer.mode = "max"
            comparable = type(buffer.tensor) is torch.Tensor and buffer.tensor.is_floating_point()
            if not buffer.mode and changing is None and comparable:
                buffer.seen = _seen(buffer.tensor).clone()
        self._own = [buffer for buffer in every if buffer.mode == "per_replica"]
        self._constant = [buffer for buffer in every if not buffer.mode]
        self._watched = [buffer for buffer in self._constant if buffer.seen is not None]
        self._running = [buffer for kind in ("max", "mean", "first") for buffer in every if buffer.mode == kind]
        self._floats = self._integers = 0  # elements of running buffers, among them
        self._means = sum(buffer.tensor.numel() for buffer in self._running if buffer.mode == "mean")
        self._maxima = sum(buffer.tensor.numel() for buffer in self._running if buffer.mode == "max")
        for buffer in self._running:
            buffer.committed = buffer.tensor.detach().clone()
            if buffer.integer:
                buffer.start, self._integers = self._integers, self._integers + buffer.tensor.numel()
            else:
                buffer.start, self._floats = self._floats, self._floats + buffer.tensor.numel()
        slots = self._integers + self._floats - self._means
        if 8 * slots * replicas > _MOST_SLOT_BYTES:
            raise MisuseError(
                f"buffers with {slots} elements (integers, and those with the mode 'first') would travel once for each of "
                f"{replicas} replicas; name fewer, or take the mode 'mean' or 'per_replica'"
            )

    @property
    def marks(self) -> int:
        """Entries of `changed`."""
        return len(self._running) + len(self._watched)

    @property
    def constant(self) -> list[tuple[str, torch.Tensor]]:
        """Those that no forward changes, by name, but for those whose values `changed` compares."""
        return [(buffer.name, buffer.tensor) for buffer in self._constant if buffer.seen is None]

    @property
    def per_replica(self) -> dict[str, Stateful]:
        return {f"buffers[{buffer.name!r}]": buffer for buffer in self._own}

    @property
    def float_room(self) -> int:
        """Elements that floating-point values take in the exchange."""
        return self._means + (self._floats - self._means) * self._replicas

    @property
    def integer_room(self) -> int:
        return self._integers * self._replicas

    # ---------------------------------------------------------------- within a batch

    def begin(self) -> None:
        """A batch begins: running buffers have their committed values."""
        self.check()
        if self._running:
            self._restore()

    def check(self) -> None:
        """Raises MisuseError if a constant buffer was changed, or another one has another shape or dtype."""
        for buffer in self._constant:
            if buffer.changed:
                raise MisuseError(without_mode(buffer.name))
        self._check_kinds((*self._running, *self._own))

    def check_values(self, changed: Sequence[float], summed: bool = False) -> None:
        """Raises MisuseError if a constant buffer was changed by what `changed` has given, of one rank or summed over all."""
        for count, buffer in zip(changed[len(self._running) :], self._watched, strict=True):
            assert buffer.seen is not None
            if count > (self._replicas > 1 and (summed or buffer.seen.numel() > 1)):
                raise MisuseError(without_mode(buffer.name))

    def _check_kinds(self, buffers: Sequence[_Buffer]) -> None:
        for buffer in buffers:
            now = buffer.current
            if not isinstance(now, torch.Tensor) or now.shape != buffer.tensor.shape or now.dtype != buffer.tensor.dtype:
                raise MisuseError(f"buffer {buffer.name} was replaced by something of another shape or dtype")

    @torch.no_grad()
    def changed(self, device: torch.device) -> torch.Tensor:
        """A 1 for each running buffer that the batch has changed, else 0, then how many elements of each constant one are
        compared and changed (float64). Values are compared, on the device: batch normalization changes its statistics without
        counting a version. Their bits are, since NaN is unequal to itself."""
        if not self.marks:
            return torch.zeros(0, dtype=torch.float64, device=device)
        marks = [torch.ne(_bits(buffer.current), _bits(buffer.committed)).any() for buffer in self._running]
        marks += [torch.ne(_seen(b.current), b.seen).sum() for b in self._watched if b.seen is not None]
        return torch.stack([mark.to(device, torch.float64) for mark in marks])

    @torch.no_grad()
    def write(self, floats: torch.Tensor, integers: torch.Tensor | None) -> None:
        """Put the values of the running buffers into their (zeroed) rooms in the exchange."""
        for buffer in self._running:
            now = buffer.current
            assert now is not None
            if buffer.integer:
                assert integers is not None
                room, begin = integers, self._replica * self._integers + buffer.start
            else:
                room = floats
                begin = buffer.start + (self._replica * (self._floats - self._means) if buffer.mode == "first" else 0)
            room[begin : begin + now.numel()].copy_(now.detach().reshape(-1))

    def united(self, floats: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the replica puts into the exchange, from the floating-point rooms of its ranks."""
        total = torch.stack(list(floats)).sum(0)
        total[self._means :] = floats[0][self._means :]
        return total

    def united_integers(self, integers: Sequence[torch.Tensor]) -> torch.Tensor:
        total, first = (t.view(self._replicas, -1) for t in (torch.stack(list(integers)).amax(0), integers[0]))
        total[:, self._maxima :] = first[:, self._maxima :]
        return total.view(-1)

    # ---------------------------------------------------------------- commit

    def commit(
        self, changed: Sequence[float], floats: torch.Tensor, integers: torch.Tensor | None, summed: Sequence[int]
    ) -> None:
        """Take the values that the exchange gave: sums over the replicas `summed` of what `write` put in on their ranks. Raises
        MisuseError, on all replicas, if a contributor has changed a constant buffer."""
        self.check_values(changed, summed=True)
        if self._running:
            self._commit(changed, floats, integers, summed)

    @torch.no_grad()
    def _commit(
        self, changed: Sequence[float], floats: torch.Tensor, integers: torch.Tensor | None, summed: Sequence[int]
    ) -> None:
        ranks = len(summed) * self._ranks
        if integers is not None:
            each = integers.view(self._replicas, self._integers)
            integers = each[list(summed)].amax(0)
            integers[self._maxima :] = each[min(summed), self._maxima :]
        if self._floats > self._means:
            firsts = floats[self._means :].view(self._replicas, self._floats - self._means)
            floats = torch.cat([floats[: self._means], firsts[min(summed)]])
        for count, buffer in zip(changed, self._running, strict=False):
            if count > 0:
                values = integers if buffer.integer else floats
                assert values is not None and buffer.committed is not None
                part = values[buffer.start : buffer.start + buffer.tensor.numel()].view(buffer.tensor.shape)
                part = part.to(buffer.tensor.device)  # devices divide differently, and replicas must not
                buffer.committed.copy_(part / ranks if buffer.mode == "mean" else part)
        self._restore()

    def discard(self) -> None:
        """Nothing of the batch counts."""
        if self._running:
            self._restore()

    def adopt(self) -> None:
        """The update may have changed any buffer, an average of the parameters say: as a function of what is committed, so its
        values are. Raises MisuseError for one that has another shape or dtype now."""
        if self._running or self._constant:
            self._adopt()

    @torch.no_grad()
    def _adopt(self) -> None:
        self._check_kinds((*self._running, *self._constant, *self._own))
        for buffer in (*self._running, *self._constant):
            if (now := buffer.current) is not buffer.tensor:
                assert now is not None
                buffer.tensor.copy_(now)
                setattr(buffer.owner, buffer.key, buffer.tensor)
            if buffer.committed is not None:
                buffer.committed.copy_(buffer.tensor)
            buffer.version = buffer.tensor._version
        self._note(self._watched)

    @torch.no_grad()
    def _restore(self) -> None:
        for buffer in self._running:
            if buffer.current is not buffer.tensor:
                setattr(buffer.owner, buffer.key, buffer.tensor)
            assert buffer.committed is not None
            buffer.tensor.copy_(buffer.committed)
            buffer.version = buffer.tensor._version

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, torch.Tensor]:
        """Constant buffers and the committed values of running ones."""
        running = {f"running_buffer/{b.name}": b.committed for b in self._running if b.committed is not None}
        return running | {f"buffer/{b.name}": b.tensor.detach() for b in self._constant}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, live in self.state().items():
            if name not in tensors or tensors[name].shape != live.shape:
                raise Fatal(f"the state to load lacks {name} of shape {list(live.shape)}")
        for buffer in self._running:
            assert buffer.committed is not None
            buffer.committed.copy_(tensors[f"running_buffer/{buffer.name}"])
        for buffer in self._constant:
            buffer.tensor.copy_(tensors[f"buffer/{buffer.name}"])
        self._note(self._constant)
        self._restore()

    @torch.no_grad()
    def _note(self, buffers: Sequence[_Buffer]) -> None:
        """These have the values that they should."""
        for buffer in buffers:
            buffer.version = buffer.tensor._version
            if buffer.seen is not None:
                buffer.seen = _seen(buffer.tensor).clone()


def is_statistic(owner: nn.Module, key: str) -> bool:
    """Whether this buffer is a running statistic of one of torch's own modules, or of a class derived from one."""
    return isinstance(owner, _NORM) and key in _STATISTICS


def modes_of(given: Mapping[str, str], names: Sequence[str], must_match: bool = True) -> dict[str, str]:
    """The mode of each of these buffers that a name or a pattern matches (`tensor_plan.matches`); if two match, the later one
    counts. Raises MisuseError for a mode that is none and, if it `must_match`, a name that is none."""
    found: dict[str, str] = {}
    for pattern, mode in given.items():
        if mode not in MODES:
            raise MisuseError(f"buffers={{{pattern!r}: {mode!r}}}: the mode must be one of {', '.join(MODES)}")
        matched = [name for name in names if matches(name, pattern)]
        if must_match and not matched:
            raise MisuseError(f"buffers={{{pattern!r}: {mode!r}}} names no buffer of the registered models")
        found |= dict.fromkeys(matched, mode)
    return found


def without_mode(name: str) -> str:
    """What is wrong with a buffer that changes and may not, and what to do."""
    return (
        f"buffer {name} is changed outside the update, and is no running statistic of torch's own modules: say what becomes of "
        f'it over the replicas, session.register(buffers={{{name!r}: MODE}}), with the MODE "mean" (of integers the maximum), '
        '"first" (the value of the lowest replica) or "per_replica" (each keeps its own)'
    )


def _mode_of(buffer: _Buffer, persistent: bool, mode: Mode, changing: Mapping[str, bool] | None) -> str:
    """Of a buffer that is not named; "" if it is constant."""
    if changing is None:
        statistic = is_statistic(buffer.owner, buffer.key)
        changes = statistic or (buffer.integer and persistent and buffer.tensor.numel() <= LARGEST_INTEGER)
    else:
        statistic, changes = changing.get(buffer.name, False), buffer.name in changing
    if changes and not (statistic or buffer.integer):
        raise MisuseError(without_mode(buffer.name))
    return "" if not changes else "max" if buffer.integer else mode


def _seen(tensor: torch.Tensor | None) -> torch.Tensor:
    """What tells whether a tensor has changed: its bits, or of a large one their sum."""
    bits = _bits(tensor)
    if bits.numel() <= _LARGEST_COPY:
        return bits
    whole = bits.is_contiguous() and bits.nbytes % 8 == bits.data_ptr() % 8 == 0
    return (bits.view(-1).view(torch.int64) if whole else bits).sum(dtype=torch.int64)  # `whole`: in a twentieth of the time


def _bits(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.detach().view(BITS[tensor.element_size()])


def _find(registered: Registered) -> Iterator[tuple[_Buffer, bool]]:
    """Every buffer once, under its first name, and whether it is persistent."""
    seen: set[int] = set()
    for model, module in registered.models.items():
        persistent = module.state_dict(keep_vars=True).keys()
        for name, tensor in module.named_buffers():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                above, _, key = name.rpartition(".")
                owner = module.get_submodule(above)
                yield _Buffer(qualified(model, name), owner, key, tensor, tensor._version), name in persistent
