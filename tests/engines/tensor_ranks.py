"""What the ranks of tensor-parallel replicas run in tests/engines/test_tensor.py: each process is one rank of two replicas.

Both replicas' engines live in the same process and share its groups, so the test sums their buckets itself; a plain loop over
the whole model in one process says what must come out. All in float64.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from helixrt.collectives.gloo_groups_private import one_gloo_worker
from helixrt.engines.module import ModuleEngine
from helixrt.engines.random_state import set_random_state
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.sharded import is_sharded, local, shard_model
from helixrt.engines.tensor_gradients import TensorRanks
from helixrt.engines.tensor_plan import apply_plan
from helixrt.errors import ConfigError, Fatal, MisuseError
from helixrt.replica.contracts import State
from tests.engines import tensor_models as models
from tests.engines.scenarios import answer, lost, raises, record, same_state, summed

SEED, REPLICAS, ACCUMULATE, CLIP = 5, 2, 2, 0.5
FLOAT32 = 1e-6
Build = Callable[[], nn.Module]


class Ranks:
    """This process's place in its replica."""

    def __init__(self, mesh: ReplicaMesh) -> None:
        self.mesh = mesh
        self.tensor = mesh.inner("tp")
        self.group = mesh.inner("dp_shard") if mesh.size("dp_shard") > 1 else None
        self.shard, self.shards = mesh.rank("dp_shard"), mesh.size("dp_shard")


class Trained:
    """A model with its optimizer; `tokens(replica, shard, position)` are a micro-batch."""

    def __init__(self, build: Build) -> None:
        torch.manual_seed(1)
        self.model = build()
        self.prepare()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)

    def prepare(self) -> None:
        self.model.double()

    def loss(self, replica: int, shard: int, position: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(10_000 * replica + 100 * shard + position)
        tokens = torch.randint(0, models.VOCABULARY, (1 + (replica + position) % 2, 8), generator=generator)
        return models.loss_sum(self.model, tokens), tokens.numel()


class Replica(Trained):
    """`compute`: None for everything in float64, else the compute type of a model in float32."""

    def __init__(
        self, replica: int, ranks: Ranks, build: Build, plan: Mapping[str, Any] | None, compute: torch.dtype | None = None
    ) -> None:
        self.replica, self.ranks, self.plan, self.compute = replica, ranks, plan, compute
        super().__init__(build)
        self.registered = Registered.of(self.model, [self.optimizer], clip_norm=CLIP)
        self.engine = self.made_engine()
        self.handed_out: list[int] = []

    def prepare(self) -> None:
        if self.compute is None:
            self.model.double()
        self.terms = apply_plan(self.model, self.ranks.tensor.mesh, self.plan)
        if self.ranks.group is not None:
            shard_model(self.model, self.ranks.group, self.compute or torch.float32)

    def made_engine(self) -> ModuleEngine:
        return ModuleEngine(
            self.registered,
            replica=self.replica,
            replicas=REPLICAS,
            seed=SEED,
            bucket_bytes=2048,
            compute_dtype=self.compute or torch.float32,
            group=self.ranks.group,
            tensor=TensorRanks(self.ranks.tensor, self.terms),
        )

    def work(self, step: int, accumulate: int = ACCUMULATE) -> None:
        self.handed_out = []
        self.engine.begin(self.handed_out.append)
        for number in range(accumulate):
            position = (step - 1) * accumulate + number
            self.engine.seed(position)
            loss, weight = self.loss(self.replica, self.ranks.shard, position)
            assert not self.handed_out, "a bucket was handed out before the last micro-batch"
            self.engine.backward(loss, weight, last=number == accumulate - 1)
        assert self.handed_out, "no bucket was handed out within backward"
        self.engine.end()
        assert sorted(self.handed_out) == list(range(len(self.engine.buckets)))
        grads = self.handed_out[: -len(self.engine._book.tensors)]
        assert grads == sorted(grads, reverse=True), "the order of buckets must be the same on every replica"


def plain_step(p: Trained, step: int, contributors: tuple[int, ...], shards: int) -> tuple[float, float]:
    """One step of one process over all micro-batches; the mean loss and the gradient's norm."""
    p.model.zero_grad()
    items, losses = 0, 0.0
    for replica in contributors:
        for shard in range(shards):
            for position in range((step - 1) * ACCUMULATE, step * ACCUMULATE):
                set_random_state(SEED, replica, shard, position)
                loss, weight = p.loss(replica, shard, position)
                loss.backward()
                items, losses = items + weight, losses + float(loss)
    for parameter in p.model.parameters():
        if parameter.grad is not None:
            parameter.grad /= float(items)
    norm = nn.utils.clip_grad_norm_(p.model.parameters(), CLIP)
    p.optimizer.step()
    return losses / items, float(norm)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


# ---------------------------------------------------------------- scenarios: each raises if something is wrong


def trains_as_one_process(
    ranks: Ranks, build: Build, plan: Mapping[str, Any] | None = None, steps: int = 3, tolerance: float = 1e-12
) -> Replica:
    """Gradients, norm, clipping, loss and parameters of `steps` steps; the second step has one contributor. `tolerance`:
    relative, of gradients; norms of some families are in float32, where a difference in float64 may change a rounding."""
    plain = Trained(build)
    replicas = [Replica(replica, ranks, build, plan) for replica in range(REPLICAS)]
    names = [name for name, _ in plain.model.named_parameters()]
    assert [name for name, _ in replicas[0].model.named_parameters()] == names
    cut = sum(replicas[0].engine._tensor.cuts(p) for p in replicas[0].model.parameters())  # type: ignore[union-attr]
    assert 0 < cut
    for step in range(1, steps + 1):
        contributors = (0,) if step == 2 else (0, 1)
        chosen = [replicas[r] for r in contributors]
        for replica in chosen:
            replica.work(step)
        sums = summed([replica.engine for replica in chosen])
        loss, norm = plain_step(plain, step, contributors, ranks.shards)
        updates = [replica.engine.apply(record(step, contributors), sums) for replica in replicas]
        assert updates[0] is not None
        close(torch.tensor(float(updates[0].loss)), torch.tensor(loss), 1e-6, f"loss of step {step}")
        close(torch.tensor(float(updates[0].grad_norm)), torch.tensor(norm), 1e-6, f"norm of step {step}")
        same_state(replicas[0].engine.state(), replicas[1].engine.state())
        for (name, mine), theirs in zip(replicas[0].model.named_parameters(), plain.model.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                assert theirs.grad is not None
                close(whole(mine.grad), theirs.grad, tolerance, f"step {step}: the gradient of {name}")
            close(whole(mine.detach()), theirs.detach(), tolerance * 100, f"step {step}: {name}")
        replicas[0].engine.check_copies()
    return replicas[0]


def close(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    far = float((mine.detach().double() - theirs.double()).abs().max()) / max(1e-3, float(theirs.abs().max()))
    assert mine.shape == theirs.shape and far <= tolerance, f"{what} differs by {far:.3g}"


def llama(ranks: Ranks) -> None:
    trains_as_one_process(ranks, models.llama, tolerance=FLOAT32)


def llama_with_tied_head(ranks: Ranks) -> None:
    replica = trains_as_one_process(ranks, lambda: models.llama(tie_word_embeddings=True), tolerance=FLOAT32)
    assert replica.model.lm_head.weight is replica.model.model.embed_tokens.weight  # type: ignore[union-attr]


def mixtral(ranks: Ranks) -> None:
    trains_as_one_process(ranks, models.mixtral, tolerance=FLOAT32)


def checkpointed_activations(ranks: Ranks) -> None:
    """A forward that is computed again within backward, and stops where it has what it needs, in a layer with experts."""

    def build() -> Any:
        model = models.mixtral()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    trains_as_one_process(ranks, build, tolerance=FLOAT32, steps=1)


def frozen_parameters(ranks: Ranks) -> None:
    """They stay frozen in every style, and have no gradient."""

    def build() -> nn.Module:
        model = models.Own()
        for part in (model.embed, model.layers[0], model.norm):
            part.requires_grad_(False)
        return model

    replica = trains_as_one_process(ranks, build, models.own_plan(), steps=1)
    assert [p.requires_grad for p in replica.model.parameters()] == [p.requires_grad for p in build().parameters()]


def qwen2(ranks: Ranks) -> None:
    trains_as_one_process(ranks, models.qwen2, tolerance=FLOAT32)


def qwen3(ranks: Ranks) -> None:
    """Norms of queries and keys see a rank's own heads; the embedding and the head are tied by default."""
    trains_as_one_process(ranks, models.qwen3, tolerance=FLOAT32)


def phi(ranks: Ranks) -> None:
    """With dropout of the hidden state, which every rank has whole."""
    trains_as_one_process(ranks, models.phi)


def gpt_neox(ranks: Ranks) -> None:
    trains_as_one_process(ranks, models.gpt_neox)


def gpt2(ranks: Ranks) -> None:
    """By the plan of `PLANS`. Its fused projection of queries, keys and values is cut in storage and gathered in use."""
    trains_as_one_process(ranks, models.gpt2)


def own_model_with_styles_of_torch(ranks: Ranks) -> None:
    """Sequence-parallel norms have partial gradients, which the ranks sum."""
    trains_as_one_process(ranks, models.Own, models.own_plan())


def loads_its_part(ranks: Ranks) -> None:
    """A fresh engine takes the state of an equal rank, where its optimizer has none yet, and goes on alike."""
    donor, fresh = (Replica(r, ranks, models.mixtral, None) for r in range(REPLICAS))
    donor.work(1)
    donor.engine.apply(record(1, (0,)), summed([donor.engine]))
    state = donor.engine.state()
    cut = dict(donor.model.named_parameters())["model.layers.0.mlp.experts.gate_up_proj"]
    part = state.tensors["parameter/model.layers.0.mlp.experts.gate_up_proj"]
    assert ranks.mesh.size() * part.numel() == cut.numel()
    fresh.engine.load(State({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.scalars)))
    same_state(state, fresh.engine.state())
    donor.work(2)
    sums = summed([donor.engine])
    for replica in (donor, fresh):
        replica.engine.apply(record(2, (0,)), sums)
    same_state(donor.engine.state(), fresh.engine.state())
    name = "dtensor/parameter/model.layers.0.self_attn.q_proj.weight"
    other = {name: str(state.scalars[name]).replace('"tp": 2', '"tp": 3')}
    wrong = State(dict(state.tensors), {**state.scalars, **other})
    raises(Fatal, "'tp': 3} ranks, and this replica has .*'tp': 2}", lambda: fresh.engine.load(wrong))


def copies_are_compared(ranks: Ranks) -> None:
    replica = Replica(0, ranks, models.llama, None)
    replica.engine.check_copies()
    if ranks.tensor.rank == 1:
        with torch.no_grad():
            local(replica.model.model.norm.weight)[0] += 1e-15  # type: ignore[union-attr,arg-type]
    match = r"parameter/model.norm.weight differs between rank tp 0 and rank tp 1"
    raises(Fatal, match, replica.engine.check_copies)


def what_cannot_be_trained_is_refused(ranks: Ranks) -> None:
    mesh = ranks.tensor.mesh
    raises(MisuseError, "Linear has no tensor-parallel plan of its own", lambda: apply_plan(nn.Linear(2, 2), mesh))
    raises(
        MisuseError,
        "entry 'layers.*.q_proj' matches no module",
        lambda: apply_plan(models.llama(), mesh, {"layers.*.q_proj": "colwise"}),
    )
    raises(MisuseError, "'colwize' for the module", lambda: apply_plan(models.llama(), mesh, {"lm_head": "colwize"}))
    raises(MisuseError, "cuts no parameter", lambda: apply_plan(models.llama(), mesh, {"lm_head": "replicate"}))
    raises(
        MisuseError, "not a Embedding|not a Linear", lambda: apply_plan(models.llama(), mesh, {"lm_head": "embedding_rowwise"})
    )
    raises(
        ConfigError,
        "mesh.tp=2: must divide num_key_value_heads=1",
        lambda: apply_plan(models.llama(num_key_value_heads=1), mesh),
    )
    raises(
        MisuseError,
        "lm_head.weight are one parameter, and the plan cuts them differently",
        lambda: apply_plan(models.gpt2(), mesh, {"lm_head": "colwise_gather_output"}),
    )
    odd = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
    raises(MisuseError, "5 outputs of 0 cannot be cut into 2", lambda: apply_plan(odd, mesh, {"0": "colwise", "1": "rowwise"}))
    experts = "model.layers.*.mlp.experts"
    raises(
        MisuseError,
        "gate_up_proj is not cut: each rank would add it once more",
        lambda: apply_plan(models.mixtral(), mesh, {experts: "moe_tp_experts", f"{experts}.down_proj": "rowwise"}),
    )
    raises(MisuseError, "and others are cut by the entry", lambda: apply_plan(models.Own(), mesh, {"head.weight": "colwise"}))
    with torch.device("meta"):
        empty = models.Own()
    raises(MisuseError, "meta device", lambda: apply_plan(empty, mesh, models.own_plan()))
    cut = models.llama()
    apply_plan(cut, mesh)
    assert apply_plan(cut, mesh) == [], "what is cut already stays"
    raises(MisuseError, "comes before fully_shard and any other plan", lambda: apply_plan(cut, mesh, {"lm_head": "colwise"}))

    def engine(model: nn.Module, tensor: TensorRanks | None = None, **more: Any) -> ModuleEngine:
        optimizer = more.pop("optimizer", torch.optim.AdamW)(model.parameters())
        return ModuleEngine(Registered.of(model, [optimizer], **more), tensor=tensor or TensorRanks(ranks.tensor))

    raises(MisuseError, "no parameter is cut over the tp ranks", lambda: engine(models.Own()))
    raises(MisuseError, r"scaler is not supported with Mesh\(tp", lambda: engine(cut, scaler=torch.amp.GradScaler("cpu")))
    raises(MisuseError, "Adafactor does not work on sharded", lambda: engine(cut, optimizer=torch.optim.Adafactor))
    fused = lambda parameters: torch.optim.AdamW(parameters, fused=True)  # noqa: E731
    raises(MisuseError, "in one call", lambda: engine(cut, optimizer=fused))
    # norms that see a rank's own heads, and a plan that does not say so
    plan = {key: style for key, style in models.qwen3().tp_plan.items() if "norm" not in key}
    silent = Replica(0, ranks, models.qwen3, plan)
    raises(
        MisuseError, r"gradients of model.layers.0.self_attn.q_norm.weight differ between the tp ranks", lambda: silent.work(1)
    )


def bfloat16_runs(ranks: Ranks) -> None:
    """Under autocast, or by FSDP2's policy: parameters and gradients stay float32, and the loss is near that of float32."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        replica = Replica(0, ranks, models.llama, None, dtype)
        for step in (1, 2):
            replica.work(step)
            update = replica.engine.apply(record(step, (0,)), [bucket.clone() for bucket in replica.engine.buckets])
        replica.engine.check_copies()
        assert update is not None
        losses.append(float(update.loss))
        assert {p.dtype for p in replica.model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in replica.model.parameters() if p.grad is not None} == {torch.float32}
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.1 * abs(losses[0]), losses


def a_lost_rank_is_told(ranks: Ranks) -> None:
    """The last scenario: the last rank ends in the middle of a step, and the others' collectives fail at once."""
    replica = Replica(0, ranks, models.llama, None)
    replica.work(1)
    if ranks.mesh.rank() == ranks.mesh.size() - 1:
        os._exit(9)
    if ranks.tensor.rank == 0 and ranks.shard != ranks.shards - 1:
        return  # its own tp group is whole, and the other rank of it fails
    with lost():
        for step in (2, 3):
            replica.work(step)


TENSOR = [
    llama,
    llama_with_tied_head,
    own_model_with_styles_of_torch,
    mixtral,
    checkpointed_activations,
    frozen_parameters,
    qwen2,
    qwen3,
    phi,
    gpt_neox,
    gpt2,
    loads_its_part,
    copies_are_compared,
    bfloat16_runs,
    what_cannot_be_trained_is_refused,
    a_lost_rank_is_told,
]
SHARDED_TENSOR = [llama, own_model_with_styles_of_torch, qwen3, mixtral, loads_its_part, copies_are_compared, bfloat16_runs]


def run(rank: int, sizes: dict[str, int], rendezvous: str, results: Any, only: str = "") -> None:
    """All scenarios of the mesh in turn; for each (rank, name, what went wrong or "")."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = sizes.get("dp_shard", 1) * sizes["tp"]
    store = dist.FileStore(rendezvous, world)
    one_gloo_worker()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    mesh = ReplicaMesh(sizes, rank, timeout=timedelta(seconds=120))
    chosen = SHARDED_TENSOR if "dp_shard" in sizes else TENSOR
    names = only.split(",") if only else [each.__name__ for each in chosen]
    answer(rank, [each for each in chosen if each.__name__ in names], lambda: Ranks(mesh), results)
