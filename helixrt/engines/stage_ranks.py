"""The ranks of a replica that share one stage of its model: how parameters lie on them, and what they tell each other.

In: the replica's mesh, and what the model says of its parameters (`ParameterLayout`). Out: which parameters' gradients are
summed over which axes; the loss of the whole batch; norms that count each element once; and a check that what several ranks
hold is the same on all of them, bit for bit.

Context (cp) and data (dp_shard) ranks have other tokens each, so gradients come in summands over them; tensor-parallel ranks
(tp) have the same tokens and parts of the parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.portions import Cut
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.errors import ConfigError, Fatal

DATA_AXES = ("dp_shard", "cp")
STAGE_AXES = (*DATA_AXES, "tp")


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter lies on the ranks that share its stage, by axes of the mesh.

    `sharded`: each rank of these axes holds another part of it; the ranks of all other axes hold the same. `summed`: each rank
    of these axes has only a summand of the gradient of what it holds. A parameter that sees a part of the positions on each tp
    rank (a norm under sequence parallelism) is `summed=("dp_shard", "cp", "tp")`; a matrix cut over tp is `sharded=("tp",)`;
    an expert's whose tokens of all data ranks come to it is `sharded=("dp_shard", "cp"), summed=()`.

    `cuts` says where it is cut over the axes of `sharded`. Without it a checkpoint can only be resumed with the same mesh.
    """

    sharded: tuple[str, ...] = ()
    summed: tuple[str, ...] = DATA_AXES
    cuts: tuple[Cut, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for key, axes in (("sharded", self.sharded), ("summed", self.summed)):
            if unknown := [axis for axis in axes if axis not in STAGE_AXES]:
                raise ConfigError(f"ParameterLayout.{key}", unknown[0], f"must be axes out of {', '.join(STAGE_AXES)}")
        if both := [axis for axis in self.sharded if axis in self.summed]:
            rule = "is in `sharded` too: ranks that hold other parts have no summands of one gradient"
            raise ConfigError("ParameterLayout.summed", both[0], rule)
        if others := [axis for each in self.cuts for axis in each.axes if axis not in self.sharded]:
            raise ConfigError("ParameterLayout.cuts", others[0], "must be axes of `sharded`")


WHOLE = ParameterLayout()

LayoutsOf = Callable[[nn.Module], Mapping[str, ParameterLayout]]


def check_layouts(sizes: Mapping[str, int], layouts: LayoutsOf | None) -> None:
    """Raises ConfigError (mesh.AXIS) if a model in stages does not say how its parameters lie on the ranks of `sizes`."""
    for axis in STAGE_AXES:
        if sizes[axis] > 1 and layouts is None:
            rule = f"needs Stages(layouts=...), which says how parameters lie on the ranks of {axis}; see docs/concepts/mesh.md"
            raise ConfigError(f"mesh.{axis}", sizes[axis], rule)


class StageRanks:
    """One rank's view of those that share its stage. All of them call the same methods in the same order, from the thread that
    computes. `chunks`: the modules of the stage, by number; `declared` gives the layouts of one of them by parameter name,
    those left out are whole everywhere. Raises ConfigError (stages.layouts) for a name that the module does not have."""

    def __init__(self, mesh: ReplicaMesh, chunks: Mapping[int, nn.Module], declared: LayoutsOf | None) -> None:
        self._mesh = mesh
        self.size = mesh.size(*STAGE_AXES)
        self.streams = mesh.size(*DATA_AXES)  # ranks with other tokens
        self.group = mesh.group(*STAGE_AXES)
        self._inner: InnerGroup | None = None
        if self.group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            self._inner = InnerGroup(DeviceMesh.from_group(self.group, "cpu"))
        self.layouts: dict[nn.Parameter, ParameterLayout] = {}
        for number, module in chunks.items():
            self._take_up(number, module, {} if declared is None else declared(module))
        places = [mesh.place_of(member) for member in mesh.members(*STAGE_AXES)]
        self._places = [{axis: place[axis] for axis in STAGE_AXES} for place in places]

    def _take_up(self, number: int, module: nn.Module, layouts: Mapping[str, ParameterLayout]) -> None:
        known = dict(module.named_parameters(remove_duplicate=False))
        if unknown := sorted(layouts.keys() - known.keys()):
            raise ConfigError("stages.layouts", unknown[0], f"part {number} has no such parameter")
        for name, parameter in known.items():
            layout = self._restricted(layouts.get(name, WHOLE))
            if self.layouts.setdefault(parameter, layout) != layout:
                raise ConfigError("stages.layouts", name, f"is {layout} in part {number}, and {self.layouts[parameter]} before")

    def _restricted(self, layout: ParameterLayout) -> ParameterLayout:
        """To the axes that this mesh has, in its order."""
        axes = [axis for axis in STAGE_AXES if self._mesh.size(axis) > 1]
        return ParameterLayout(
            tuple(axis for axis in axes if axis in layout.sharded), tuple(axis for axis in axes if axis in layout.summed)
        )

    def sum_groups(self, layouts: Sequence[ParameterLayout]) -> list[dist.ProcessGroup | None]:
        """For each of these the group to sum gradients over, for a thread of its own; equal axes give the same one."""
        made: dict[tuple[str, ...], dist.ProcessGroup | None] = {(): None}
        for layout in layouts:
            if layout.summed not in made:
                made[layout.summed] = self._mesh.separate_group(*layout.summed)
        return [made[layout.summed] for layout in layouts]

    def mean_loss(self, loss: float) -> float:
        """Over the ranks with other tokens, the same bits on all of them."""
        if self.streams == 1:
            return loss
        found = [float(each) for each in self._gather(torch.tensor([loss], dtype=torch.float64))]
        own = [value for value, place in zip(found, self._places, strict=True) if place["tp"] == self._mesh.rank("tp")]
        return math.fsum(own) / len(own)

    def squared_norm(
        self,
        buckets: Sequence[torch.Tensor],
        layouts: Sequence[ParameterLayout],
        differing: Callable[[int], Iterator[tuple[str, torch.Tensor]]],
        skipped: frozenset[int] = frozenset(),
    ) -> float:
        """Of the stage's whole gradient, the same bits on all its ranks; each element counts once. `skipped` buckets do not.

        Raises Fatal if ranks that should have the same gradient do not; `differing(bucket)` gives a bucket's gradients by name,
        to find the parameter.
        """
        squares = [
            torch.linalg.vector_norm(bucket, dtype=torch.float64).item() ** 2
            if index not in skipped and self._counts(layout)
            else 0.0
            for index, (bucket, layout) in enumerate(zip(buckets, layouts, strict=True))
        ]
        mine = math.fsum(squares)
        if self._inner is None:
            return mine
        sums = [_sum_of_bits(b) if self._copied(layout) else 0 for b, layout in zip(buckets, layouts, strict=True)]
        said = torch.tensor([mine], dtype=torch.float64).view(torch.int64)
        table = torch.stack(self._gather(torch.cat((said, torch.tensor(sums, dtype=torch.int64)))))
        for index, layout in enumerate(layouts):
            if self._unequal(table[:, index + 1].tolist(), layout):
                named = list(differing(index))
                self._raise_for(named, [layout] * len(named), "gradient")
        return math.fsum(table[:, 0].contiguous().view(torch.float64).tolist())

    def check_copies(self, registered: Registered) -> None:
        """Raises Fatal, with its name, for a parameter or an optimizer's state of one that is not the same on all ranks that
        hold a copy."""
        if self._inner is None:
            return
        held: list[tuple[str, torch.Tensor]] = []
        layouts: list[ParameterLayout] = []
        for name, parameter in registered.parameters():
            mine = [(name, parameter.detach())]
            for key, optimizer in registered.optimizers.items():
                entries = optimizer.state.get(parameter, {})
                mine += [(f"{entry} of {name} in optimizer {key}", t) for entry, t in entries.items() if torch.is_tensor(t)]
            held += mine
            layouts += [self.layouts[parameter]] * len(mine)
        self._raise_for(held, layouts, "value")

    def _raise_for(self, held: Sequence[tuple[str, torch.Tensor]], layouts: Sequence[ParameterLayout], what: str) -> None:
        table = torch.stack(self._gather(torch.tensor([_digest(tensor) for _, tensor in held], dtype=torch.int64)))
        for index, ((name, _), layout) in enumerate(zip(held, layouts, strict=True)):
            if found := self._unequal(table[:, index].tolist(), layout):
                one, other = found
                whole = "all axes" if not layout.sharded else f"all axes but {', '.join(layout.sharded)}"
                raise Fatal(
                    f"the {what} of {name} differs between {one} and {other} of this replica, which must hold the same: its "
                    f"layout says that it is whole over {whole}, and that its gradient is summed over "
                    f"{', '.join(layout.summed) or 'none'}; correct Stages(layouts=...) if that is wrong, else suspect the "
                    "memory of one of the two"
                )

    def _gather(self, mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self._inner is not None
        return self._inner.gather(mine)

    def _unequal(self, values: Sequence[int], layout: ParameterLayout) -> tuple[str, str] | None:
        """Two ranks that should have the same value and do not."""
        first: dict[tuple[int, ...], int] = {}  # by place on the sharded axes: the first rank that holds this part
        for rank, place in enumerate(self._places):
            one = first.setdefault(tuple(place[axis] for axis in layout.sharded), rank)
            if values[rank] != values[one]:
                return self._called(one), self._called(rank)
        return None

    def _called(self, rank: int) -> str:
        names = [f"{axis} {place}" for axis, place in self._places[rank].items() if self._mesh.size(axis) > 1]
        return "rank " + ", ".join(names)

    def _counts(self, layout: ParameterLayout) -> bool:
        """Whether this rank's copy is the one that counts."""
        return all(self._mesh.rank(axis) == 0 for axis in STAGE_AXES if axis not in layout.sharded)

    def _copied(self, layout: ParameterLayout) -> bool:
        """Whether several ranks hold the same."""
        return any(self._mesh.size(axis) > 1 for axis in STAGE_AXES if axis not in layout.sharded)


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The same for the same bits, in whatever order they are added up."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(tensor.view(integers[tensor.element_size()]).sum(dtype=torch.int64).item())


def _digest(tensor: torch.Tensor) -> int:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(raw.data, digest_size=8).digest(), "little", signed=True)
