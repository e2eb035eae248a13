"""Buffers of modules: those that a forward changes (running statistics) and those that stay as they are.

A *running* buffer has a committed value, which is replicated state. A batch begins with it, changes the module's own tensor,
and the changed values travel in the exchange; at commit the committed value becomes the mean over the contributors and
their dp_shard ranks (`"mean"`) or that of the lowest contributor's first rank (`"first"`), for integers and booleans the
maximum. A batch that is begun again begins with the committed value again. Values need not be finite (an attention mask, a
minimum so far): whether gradients are is looked for elsewhere in the exchange. What the update does to any buffer is committed.

Which buffers are running is fixed at registration, because the layout of the exchange must be known to a replica that
has computed nothing yet: persistent ones with at most `LARGEST_FLOAT` (integers: `LARGEST_INTEGER`) elements, and those that
are named. Any other buffer is constant; one that changes raises, with its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from helixrt.engines.registered import Registered, qualified
from helixrt.engines.samples import BITS
from helixrt.errors import Fatal, MisuseError

Mode = Literal["mean", "first"]
LARGEST_FLOAT, LARGEST_INTEGER = 1 << 16, 1 << 10
_MOST_SLOT_BYTES = 256 << 20  # of values that travel once per replica


@dataclass
class _Buffer:
    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor  # the module's own, whatever stands in its place within a batch
    version: int  # of `tensor`, when it was last known to hold what it should
    committed: torch.Tensor | None = None  # of a running one
    start: int = 0  # of a running one, among the elements of its kind

    @property
    def integer(self) -> bool:
        return not self.tensor.is_floating_point()

    @property
    def current(self) -> torch.Tensor | None:
        return getattr(self.owner, self.key, None)

    @property
    def changed(self) -> bool:
        return self.current is not self.tensor or self.tensor._version != self.version


class Buffers:
    """All buffers of the registered models; one thread calls everything but `state`.

    `changing`: names of those that a forward changes, where that is known; else the rule above decides.
    """

    def __init__(
        self,
        registered: Registered,
        mode: Mode,
        replica: int,
        replicas: int,
        ranks: int = 1,
        changing: Collection[str] | None = None,
    ) -> None:
        if mode not in ("mean", "first"):
            raise MisuseError(f"buffers={mode!r}: must be 'mean' or 'first'")
        self._mode, self._replica, self._replicas, self._ranks = mode, replica, replicas, ranks
        self._running: list[_Buffer] = []
        self._constant: list[_Buffer] = []
        self._floats = self._integers = 0  # elements of running buffers
        self.not_persistent: set[str] = set()  # names of those that no state_dict has
        named = set(registered.running_buffers)
        for buffer, persistent in _find(registered):
            if not persistent:
                self.not_persistent.add(buffer.name)
            largest = LARGEST_INTEGER if buffer.integer else LARGEST_FLOAT
            chosen = buffer.name in named
            named.discard(buffer.name)
            expected = persistent and buffer.tensor.numel() <= largest if changing is None else buffer.name in changing
            if buffer.tensor.is_complex() or not (chosen or expected):
                self._constant.append(buffer)
                continue
            buffer.committed = buffer.tensor.detach().clone()
            if buffer.integer:
                buffer.start, self._integers = self._integers, self._integers + buffer.tensor.numel()
            else:
                buffer.start, self._floats = self._floats, self._floats + buffer.tensor.numel()
            self._running.append(buffer)
        if named:
            raise MisuseError(f"running_buffers names {min(named)!r}, which is no buffer of the registered models")
        slots = self._integers + (self._floats if mode == "first" else 0)
        if 8 * slots * replicas > _MOST_SLOT_BYTES:
            raise MisuseError(
                f"running buffers with {slots} elements would travel once for each of {replicas} replicas; name fewer integer "
                "buffers, or take the mean (buffers='mean')"
            )

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def constant(self) -> list[tuple[str, torch.Tensor]]:
        """Those that no forward changes, by name."""
        return [(buffer.name, buffer.tensor) for buffer in self._constant]

    @property
    def float_room(self) -> int:
        """Elements that floating-point values take in the exchange."""
        return self._floats * (self._replicas if self._mode == "first" else 1)

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
        """Raises MisuseError if a constant buffer was changed, or a running one has another shape or dtype."""
        for buffer in self._constant:
            if buffer.changed:
                raise MisuseError(
                    f"buffer {buffer.name} was changed. It does not travel between replicas, because it is not persistent or "
                    f"is large: name it in register(running_buffers=[{buffer.name!r}])"
                )
        self._check_kinds(self._running)

    def _check_kinds(self, buffers: Sequence[_Buffer]) -> None:
        for buffer in buffers:
            now = buffer.current
            if not isinstance(now, torch.Tensor) or now.shape != buffer.tensor.shape or now.dtype != buffer.tensor.dtype:
                raise MisuseError(f"buffer {buffer.name} was replaced by something of another shape or dtype")

    @torch.no_grad()
    def changed(self, device: torch.device) -> torch.Tensor:
        """A 1 for each running buffer that the batch has changed, else 0 (float64). Values are compared, on the device: batch
        normalization changes its statistics without counting a version. Their bits are, since NaN is unequal to itself."""
        if not self._running:
            return torch.zeros(0, dtype=torch.float64, device=device)
        marks = [torch.ne(_bits(buffer.current), _bits(buffer.committed)).any() for buffer in self._running]
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
                begin = buffer.start + (self._replica * self._floats if self._mode == "first" else 0)
            room[begin : begin + now.numel()].copy_(now.detach().reshape(-1))

    def united(self, floats: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the replica puts into the exchange, from the floating-point rooms of its ranks."""
        return floats[0] if self._mode == "first" else torch.stack(list(floats)).sum(0)

    # ---------------------------------------------------------------- commit

    def commit(
        self, changed: Sequence[float], floats: torch.Tensor, integers: torch.Tensor | None, summed: Sequence[int]
    ) -> None:
        """Take the values that the exchange gave: sums over the replicas `summed` of what `write` put in on their ranks."""
        if self._running:
            self._commit(changed, floats, integers, summed)

    @torch.no_grad()
    def _commit(
        self, changed: Sequence[float], floats: torch.Tensor, integers: torch.Tensor | None, summed: Sequence[int]
    ) -> None:
        ranks = len(summed) * self._ranks
        if integers is not None:
            integers = integers.view(self._replicas, self._integers)[list(summed)].amax(0)
        if self._mode == "first":
            floats = floats.view(self._replicas, self._floats)[min(summed)]
        for count, buffer in zip(changed, self._running, strict=True):
            if count > 0:
                values = integers if buffer.integer else floats
                assert values is not None and buffer.committed is not None
                part = values[buffer.start : buffer.start + buffer.tensor.numel()].view(buffer.tensor.shape)
                part = part.to(buffer.tensor.device)  # devices divide differently, and replicas must not
                buffer.committed.copy_(part / ranks if self._mode == "mean" and not buffer.integer else part)
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
        self._check_kinds(self._running)
        self._check_kinds(self._constant)
        for buffer in (*self._running, *self._constant):
            if (now := buffer.current) is not buffer.tensor:
                assert now is not None
                buffer.tensor.copy_(now)
                setattr(buffer.owner, buffer.key, buffer.tensor)
            if buffer.committed is not None:
                buffer.committed.copy_(buffer.tensor)
            buffer.version = buffer.tensor._version

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
            buffer.version = buffer.tensor._version
        self._restore()


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
