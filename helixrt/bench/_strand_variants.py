"""What `helixrt bench strands` measures: ways to run a step, and its compute and communication alone.

In: a captured stage of a model that two ranks share, a measured profile. Out: `Way`s, which run one step of several
micro-batches; graphs without communication; a step's communication without compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx, nn

from helixrt.errors import ConfigError
from helixrt.parallel.group import Group
from helixrt.passes import nodes
from helixrt.passes.early import early
from helixrt.passes.executable import Executable
from helixrt.passes.measure import Operation, finish
from helixrt.passes.pair import Pairing, Rules, baseline
from helixrt.passes.parts import Part, Port, Role, Split
from helixrt.passes.profile import Profile
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.split import split, whole_backward
from helixrt.passes.verify import returned
from helixrt.passes.weave import weave
from helixrt.pipeline.gradients import ParameterGradients
from helixrt.pipeline.single_stage import Inputs, SingleStage
from helixrt.pipeline.strands import Plan, Strands, agree_among_ranks, flattened, paired
from helixrt.train.config import ModelConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import ParallelGroups

CONTEXT_PARALLEL = {"gpt-cp": "gathered", "gpt-ring": "ring"}
MODELS = ("gpt-tp", "llama-sp", "moe-ep", *CONTEXT_PARALLEL)
EXPERTS = 4
SEED = 5
TOKENS, TARGET = Port(Role.INPUT, "0"), Port(Role.TARGET, "target")

# What is compared, beside eager and a single strand: policy and rules of the pairing. The ablation is DHelix's Figure 15.
PAIRED: dict[str, tuple[str, Rules]] = {
    "intra_batch": ("intra_batch", Rules()),
    "round_robin": ("round_robin", Rules()),
    "eq2": ("eq2", Rules()),
    "helix": ("helix", Rules()),
}
ABLATION: dict[str, tuple[str, Rules]] = {
    "pairing": ("helix", Rules(reorder=False, cross=False)),
    "pairing+cross": ("helix", Rules(reorder=False)),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and a step, as each rank has it: `batch` sequences of `seq_len` tokens per micro-batch."""

    model: str
    layers: int
    dim: int
    seq_len: int
    batch: int
    microbatches: int
    device: str = "cpu"

    def config(self) -> ModelConfig:
        """The model's settings. Raises ConfigError for a model that is not known."""
        if self.model not in MODELS:
            raise ConfigError("--model", self.model, "must be one of " + ", ".join(MODELS))
        heads = max(2, self.dim // 128)
        family = "llama" if self.model == "llama-sp" else "gpt"
        experts = EXPERTS if self.model == "moe-ep" else 0
        context = CONTEXT_PARALLEL.get(self.model, "gathered")
        return ModelConfig(
            family=family,
            layers=self.layers,
            dim=self.dim,
            heads=heads,
            kv_heads=heads,
            ffn=4 * self.dim,
            experts=experts,
            context=context,
        )

    def groups(self, world: Group) -> ParallelGroups:
        if self.model == "moe-ep":
            return ParallelGroups(ep=world)
        if self.model in CONTEXT_PARALLEL:
            return ParallelGroups(cp=world)
        return ParallelGroups(tp=world, sequence=self.model == "llama-sp")

    def module(self, world: Group) -> nn.Module:
        groups = self.groups(world)
        whole = self.seq_len * (groups.cp.size if groups.cp else 1)
        scale = 1.0 / self.microbatches
        return build_chunk(self.config(), whole, 0, 1, seed=SEED, groups=groups, auxiliary_scale=scale).to(self.device)

    def inputs(self, world: Group) -> list[dict[Port, torch.Tensor]]:
        """The micro-batches: the same on ranks that share tokens, others on ranks of ep and cp."""
        own = world.rank if self.model in ("moe-ep", *CONTEXT_PARALLEL) else 0
        generator = torch.Generator().manual_seed(SEED + own)
        shape = (2, self.microbatches, self.batch, self.seq_len)
        tokens, targets = torch.randint(0, self.config().vocab, shape, generator=generator).to(self.device)
        return [{TOKENS: x, TARGET: y} for x, y in zip(tokens, targets, strict=True)]


@dataclass(frozen=True)
class Way:
    """One way to run a step; `run` leaves gradients in `p.grad` and returns the micro-batches' losses.

    `pairing` is None where nothing is paired; `same_as` names a way whose order is this one's too.
    """

    run: Callable[[], torch.Tensor]
    pairing: Pairing | None = None
    same_as: str | None = None


class Stage:
    """The captured stage on this rank, and all ways to run it."""

    def __init__(self, joint: Part, module: nn.Module, inputs: list[dict[Port, torch.Tensor]]) -> None:
        self.joint, self.module, self.inputs = joint, module, inputs
        self.halves: Split = split(joint)
        self.forward, self.backward = self.halves.forward, early(whole_backward(self.halves))
        agree_among_ranks([self.forward, self.backward])
        self.executables = Executable(self.forward), Executable(self.backward)

    def eager(self) -> Way:
        """Plain PyTorch: every collective waited for at once."""

        def run() -> torch.Tensor:
            losses = []
            for given in self.inputs:
                loss = token_loss(self.module(given[TOKENS]), given[TARGET])
                (loss / len(self.inputs)).backward()
                losses.append(loss.detach())
            return torch.stack(losses)

        return Way(run)

    def single(self) -> Way:
        return Way(self.step(Strands(self.halves, *self.executables)))

    def compute(self) -> Way:
        """The single strand without communication: each collective's result is there already."""
        forward, backward = (Executable(without_communication(part)) for part in (self.forward, self.backward))
        return Way(self.step(Strands(self.halves, forward, backward)))

    def communication(self) -> Callable[[], None]:
        """A step's collectives, one after the other."""
        operations = [
            Operation.of(node)
            for part in (self.forward, self.backward)
            for node in part.graph.nodes
            if nodes.is_collective(node)
        ]

        def run() -> None:
            for _ in self.inputs:
                for operation in operations:
                    finish(operation())

        return run

    def paired(self, measured: Profile, wanted: dict[str, tuple[str, Rules]]) -> dict[str, Way]:
        """Woven ways by name; all ranks must come here with the same profile."""
        strands = tuple(measured.operators(self.forward)), tuple(measured.operators(self.backward))
        found: dict[str, Way] = {}
        for name, (policy, rules) in wanted.items():
            if policy == "helix":
                pairing = paired(self.forward, self.backward, measured, rules)
            else:
                pairing = baseline(policy, *strands, measured.overlap, rules)
                pairing = flattened(self.forward, self.backward, pairing, measured)
            twin = next((n for n, w in found.items() if w.pairing and w.pairing.order == pairing.order), None)
            if twin is not None:
                found[name] = Way(found[twin].run, pairing, twin)
                continue
            woven = weave(self.forward, self.backward, pairing.order)
            agree_among_ranks([woven])
            plan = Plan(pairing.order, pairing, measured, *strands)
            found[name] = Way(self.step(Strands(self.halves, *self.executables, Executable(woven), plan)), pairing)
        return found

    def step(self, strands: Strands) -> Callable[[], torch.Tensor]:
        stage = SingleStage(strands, self.module)
        gradients = ParameterGradients(stage.parameters(), self.joint.layouts)
        inputs: list[Inputs] = [*self.inputs]
        return lambda: stage.run(inputs, gradients)


def without_communication(part: Part) -> Part:
    """The part with a tensor held ready in place of each collective's result. Its results mean nothing."""
    root = fx.GraphModule(part.module, part.graph)
    rewriter = GraphRewriter()
    held: dict[tuple[tuple[int, ...], torch.dtype], str] = {}
    for node in part.graph.nodes:
        if nodes.is_collective(node):
            value = node.meta["val"]
            key = tuple(value.shape), value.dtype
            if key not in held:
                held[key] = f"held{len(held)}"
                root.register_buffer(
                    held[key], torch.full(key[0], 0.01 if key[1].is_floating_point else 0, dtype=key[1], device=value.device)
                )
            ready = rewriter.graph.get_attr(held[key])
            ready.meta = dict(node.meta)
            rewriter.made[node] = ready
        elif nodes.is_wait(node):
            rewriter.made[node] = rewriter.of(nodes.tensor_arguments(node)[0])
        elif node.op == "output":
            rewriter.graph.output(tuple(rewriter.of(result) for result in returned(part)))
        else:
            rewriter.copy(node)
    module = rewriter.module(root, part.module)
    return Part(module, part.inputs, part.outputs, part.stamps, part.layouts)
