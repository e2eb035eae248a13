"""The ranks of a replica that share one stage of its model: how parameters lie on them, and what they tell each other.

In: the replica's mesh, and the model's declarations for its parameters (`ParameterLayout`). Out: which parameters' gradients
are summed over which axes; the loss of the whole batch; norms that count each element once; and a check that what several ranks
hold is the same on all of them, bit for bit.

Context (cp) and data (dp_shard) ranks have other tokens each, so gradients come in summands over them; tensor-parallel ranks
(tp) have the same tokens and parts of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from helixrt.engines.copies import Copies, Held, held_in
from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.portions import Cut
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.sharded import is_sharded
from helixrt.engines.state_tree import segment
from helixrt.errors import ConfigError

DATA_AXES = ("dp_shard", "cp")
STAGE_AXES = (*DATA_AXES, "tp")


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter is placed on the ranks that share its stage, by axes of the mesh.

    `sharded`: each rank of these axes holds another part of it; the ranks of all other axes hold the same. `summed`: each rank
    of these axes has only a summand of the gradient of what it holds. A parameter that sees a part of the positions on each tp
    rank (a norm under sequence parallelism) is `summed=("dp_shard", "cp", "tp")`; a matrix cut over tp is `sharded=("tp",)`;
    an expert, which gets tokens of all data ranks, is `sharded=("dp_shard", "cp"), summed=()`.

    `cuts`: where it is cut over the axes of `sharded`. Without it a checkpoint can only be resumed with the same mesh.
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
_REMEDY = (
    "correct Stages(layouts=...) if they do not, or if the gradient comes in summands that it does not name; else suspect the "
    "memory of one of the two"
)

LayoutsOf = Callable[[nn.Module], Mapping[str, ParameterLayout]]


def check_layouts(sizes: Mapping[str, int], layouts: LayoutsOf | None) -> None:
    """Raises ConfigError (mesh.AXIS) if a model in stages does not say how its parameters lie on the ranks of `sizes`."""
    for axis in ("cp", "tp"):  # over dp_shard FSDP2 cuts them, as DTensors
        if sizes[axis] > 1 and layouts is None:
            rule = f"needs Stages(layouts=...) for the placement of parameters on the ranks of {axis}: docs/concepts/mesh.md"
            raise ConfigError(f"mesh.{axis}", sizes[axis], rule)


def _of_shards(layout: ParameterLayout) -> ParameterLayout:
    """Of a parameter of this layout that FSDP2 has sharded over dp_shard, and whose gradient it sums there."""
    sharded = tuple(axis for axis in STAGE_AXES if axis == "dp_shard" or axis in layout.sharded)
    return ParameterLayout(sharded, tuple(axis for axis in layout.summed if axis != "dp_shard"))


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
        axes = [axis for axis in STAGE_AXES if mesh.size(axis) > 1]
        self._places = [{axis: place[axis] for axis in axes} for place in places]
        self._copies = None if self._inner is None else Copies(self._inner, self._places)

    def _take_up(self, number: int, module: nn.Module, layouts: Mapping[str, ParameterLayout]) -> None:
        known = dict(module.named_parameters(remove_duplicate=False))
        if unknown := sorted(layouts.keys() - known.keys()):
            raise ConfigError("stages.layouts", unknown[0], f"part {number} has no such parameter")
        for name, parameter in known.items():
            layout = self._restricted(layouts.get(name, WHOLE))
            if self._mesh.size("dp_shard") > 1 and is_sharded(parameter):
                layout = _of_shards(layout)
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
        found = [float(each) for each in self._gather(torch.tensor([loss], dtype=torch.float64, device="cpu"))]
        mine = self._mesh.rank("tp")
        own = [value for value, place in zip(found, self._places, strict=True) if place.get("tp", 0) == mine]
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
        counted = [
            torch.linalg.vector_norm(bucket, dtype=torch.float64)
            for index, (bucket, layout) in enumerate(zip(buckets, layouts, strict=True))
            if index not in skipped and self._counts(layout)
        ]
        mine = math.fsum(norm**2 for norm in torch.stack(counted).tolist()) if counted else 0.0
        if self._copies is None:
            return mine
        sums = [_sum_of_bits(b) if self._copied(layout) else 0 for b, layout in zip(buckets, layouts, strict=True)]
        said = torch.tensor([mine], dtype=torch.float64, device="cpu").view(torch.int64)
        table = torch.stack(self._gather(torch.cat((said, torch.tensor(sums, dtype=torch.int64, device="cpu")))))
        for index, layout in enumerate(layouts):
            if self._copies.unequal(table[:, index + 1].tolist(), layout.sharded):
                found = [Held(f"the gradient of {name}", gradient, layout.sharded) for name, gradient in differing(index)]
                self._copies.check(found, _REMEDY)
        return math.fsum(table[:, 0].contiguous().view(torch.float64).tolist())

    def check_copies(self, registered: Registered, state: ReplicatedState) -> None:
        """Raises Fatal, with its name, for an entry of the state that is not the same on all ranks that hold a copy. Buffers
        are left out: those that no forward changes may be a rank's own."""
        if self._copies is None:
            return
        cut = {segment(name): self.layouts[parameter].sharded for name, parameter in registered.parameters()}

        def axes(name: str, tensor: torch.Tensor | None) -> tuple[str, ...] | None:
            kind, *rest = name.split("/")
            if kind == "optimizer" and rest[1] == "state":
                return cut.get(rest[2], ())  # none has state before the first update
            if kind == "parameter":
                return cut[segment("/".join(rest))]
            return None if kind.endswith("buffer") else ()

        self._copies.check(held_in(state, axes), _REMEDY)

    def _gather(self, mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self._inner is not None
        return self._inner.gather(mine)

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
