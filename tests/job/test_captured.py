"""Unmodified models over pipeline stages on the session: trained as a plain loop trains them; wrong calls.

Stages are threads; what each of them would capture is captured once (`cut_once`).
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import helixrt
from helixrt.compile.fake_tensors_private import is_fake
from helixrt.compile.whole_model import WholeModel
from helixrt.engines.captured import CapturedModel, pipeline_schedule
from helixrt.engines.captured_tensor import check_optimizers
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.staged import StagePlace
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.mesh import Mesh
from helixrt.job.session_host import Plan
from helixrt.passes.autocast import autocast_to
from helixrt.passes.cut_model import CutModel
from helixrt.passes.errors import DisagreementError
from helixrt.record import FlightRecord
from helixrt.replica.rank import WorkOrder
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Entry, Op, Operation, ScheduleError
from tests.job.drawn import Divided, Drawn, nowhere
from tests.job.session_world import LocalHost, session_with

WIDTH, BATCH, MICROBATCHES, STEPS = 6, 8, 4, 3
VOCABULARY, LENGTH = 19, 5
SEED = 5

Batches = list[tuple[tuple[Any, ...], dict[str, Any], Any]]  # positional arguments, keywords, target


class StageHost(LocalHost):
    """Of one stage; the stages of a test are threads of this process."""

    def __init__(
        self, stage: int = 0, stages: int = 1, group: Any = None, mesh: ReplicaMesh | None = None, **others: Any
    ) -> None:
        super().__init__(**others)
        record = FlightRecord(f"pp{stage}")
        self.place = StagePlace(stage, stages, group if stages > 1 else None, record, mesh or ReplicaMesh({}))

    def connect_stages(self, device: torch.device) -> StagePlace:
        return self.place


@pytest.fixture(autouse=True)
def cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a test get the same cut of the same model."""
    lock = threading.Lock()
    known: dict[Any, Any] = {}

    def once(method: str, original: Any) -> Any:
        def call(self: WholeModel, *arguments: Any) -> Any:
            frozen = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
            shown = [argument.hash if isinstance(argument, CutModel) else argument for argument in arguments]
            key = f"{method} {self.model} {frozen} {self.args} {self.kwargs} {self.target} {self.autocast} {shown}"
            with lock:
                if key not in known:
                    known[key] = original(self, *arguments)
                return known[key]

        return call

    for method in ("cut", "again"):
        monkeypatch.setattr(WholeModel, method, once(method, getattr(WholeModel, method)))


# ---------------------------------------------------------------- models and batches


class Perceptron(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x if scale is None else x * scale)


def perceptron() -> nn.Module:
    torch.manual_seed(3)
    return Perceptron().double()


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=4,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).double()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).double()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        num_local_experts=3,
        output_router_logits=True,  # all layers' are in the loss
        experts_implementation="batched_mm",
    )
    return MixtralForCausalLM(config).double()


class LearnedScale(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 0.3, dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output * self.scale, target)


def vectors() -> Batches:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return [((x,), {"scale": x.exp()}, x[:, :2]) for x in drawn]


def text() -> Batches:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]
    return [((), {"input_ids": tokens, "labels": tokens}, None) for tokens in drawn]


def padded() -> Batches:
    """Every other row has padding at its end."""
    batches = []
    for _, named, _ in text():
        mask = torch.ones_like(named["input_ids"])
        mask[::2, -2:] = 0
        labels = named["labels"].masked_fill(mask == 0, -100)
        batches.append(((), {**named, "labels": labels, "attention_mask": mask}, None))
    return batches


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[], Batches]]] = {  # model, its loss, batches
    "perceptron": (perceptron, lambda: mse_loss, vectors),
    "learned": (perceptron, LearnedScale, vectors),
    "gpt2": (gpt2, lambda: None, text),
    "llama": (llama, lambda: None, padded),
    "mixtral": (mixtral, lambda: None, text),
}


# ---------------------------------------------------------------- training


def trained(
    host: StageHost,
    model: nn.Module,
    loss: Any,
    batches: Batches,
    tp_plan: Any = None,
    buffers: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """This stage's state, and (loss, norm) of each step."""
    over = host.place.mesh
    session = session_with(host, seed=SEED, mesh=Mesh(pp=host.place.stages, cp=over.size("cp"), tp=over.size("tp")))
    args, kwargs, target = batches[0]
    example = helixrt.ExampleBatch(*args, target=target, **kwargs)
    compiled = helixrt.compile(model, loss=loss, microbatches=MICROBATCHES, **options)
    part = session.parallelize(compiled, example=example, tp_plan=tp_plan)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    session.register(model=part, optimizers=[optimizer], clip_norm=0.5, buffers=buffers)
    session.evaluate(lambda: part.evaluate(*args, target=target, **kwargs), every=STEPS)
    found = []
    for step in session.steps(batches, until=STEPS):
        for inputs, named, goal in step:
            loss_of_batch = step.train(part, *inputs, target=goal, **named)
        done = step.commit()
        if done.committed:
            found.append((loss_of_batch, float(done.grad_norm)))
    return {name: value.clone() for name, value in part.state_dict().items()}, found


def plain(
    model: nn.Module, loss: Any, batches: Batches, autocast: torch.dtype | None = None, divided: Divided = nowhere
) -> tuple[dict[str, torch.Tensor], list[Any], float]:
    """The same by autograd on one process, which drops what ranks drop that have parts as `divided` says; the last is the loss
    in evaluation mode."""
    both = nn.ModuleDict({"loss": loss} if isinstance(loss, nn.Module) else {})
    parameters = [*model.parameters(), *both.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def losses(position: int) -> list[torch.Tensor]:
        args, kwargs, target = batches[position]
        found = []
        for at in range(MICROBATCHES):
            part = slice(at * BATCH // MICROBATCHES, (at + 1) * BATCH // MICROBATCHES)
            with autocast_to(autocast, "cpu"), Drawn(SEED, position, at, divided):
                output = model(*(x[part] for x in args), **{name: x[part] for name, x in kwargs.items()})
                found.append(output.loss if loss is None else loss(output, target[part]))
        return found

    figures = []
    for position in range(len(batches)):
        optimizer.zero_grad()
        found = losses(position)
        for each in found:
            (each / MICROBATCHES).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        figures.append((sum(each.item() for each in found) / MICROBATCHES, float(norm)))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        validated = sum(each.item() for each in losses(0)) / MICROBATCHES
    return {**model.state_dict(), **both.state_dict()}, figures, validated


def over_stages(run_stages: Any, stages: int, case: str, **options: Any) -> tuple[list[Any], dict[int, StageHost]]:
    """What `trained` gave on each stage."""
    build, loss, batches = CASES[case]
    models = [(build(), loss()) for _ in range(stages)]
    hosts: dict[int, StageHost] = {}

    def stage(number: int, group: Any) -> Any:
        hosts[number] = StageHost(number, stages, group)
        return trained(hosts[number], *models[number], batches(), **options)

    return run_stages(stages, stage, timeout_s=240.0), hosts


def check_equal(case: str, found: list[Any], hosts: dict[int, StageHost]) -> None:
    build, loss, batches = CASES[case]
    expected, figures, validated = plain(build(), loss(), batches())
    states = [state for state, _ in found]
    assert set().union(*states) == set(expected)
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert all(told == found[0][1] for _, told in found)  # loss and norm are over all stages, and known to each
    assert found[0][1] == [(pytest.approx(a, rel=1e-6), pytest.approx(b, rel=1e-6)) for a, b in figures]
    for host in hosts.values():
        ((step, values),) = host.validated
        assert step == STEPS and values["value"] == pytest.approx(validated, rel=1e-6)


DEFAULT = [("perceptron", 1, "auto"), ("perceptron", 2, "interleaved"), ("perceptron", 2, "zb"), ("gpt2", 2, "1f1b")]
SLOW = [
    ("gpt2", 1, "auto"),
    ("gpt2", 4, "zb-h1"),
    ("gpt2", 2, "zbv"),  # both ends of the model, which are tied, on the first stage
    ("gpt2", 2, "dualpipev"),
    ("llama", 2, "1f1b"),
    ("llama", 4, "zb"),
    ("llama", 2, "interleaved"),
    ("mixtral", 2, "zbv"),
    ("mixtral", 4, "1f1b"),
    ("learned", 2, "1f1b"),
]


@pytest.mark.system
@pytest.mark.parametrize(
    ("case", "stages", "schedule"),
    [*DEFAULT, *(pytest.param(*each, marks=[pytest.mark.slow, pytest.mark.grid]) for each in SLOW)],
)
def test_stages_train_as_a_plain_loop_does(run_stages: Any, case: str, stages: int, schedule: str) -> None:
    check_equal(case, *over_stages(run_stages, stages, case, schedule=schedule))


def test_cuts_are_where_the_user_says(run_stages: Any) -> None:
    found, hosts = over_stages(run_stages, 2, "perceptron", cuts=["layers.1"])
    check_equal("perceptron", found, hosts)
    assert [sorted({name.rsplit(".", 1)[0] for name in state}) for state, _ in found] == [
        ["layers.0"],
        ["head", "layers.1", "layers.2", "layers.3"],
    ]


def last_first(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """All forwards as they come, then the whole backwards with the last micro-batch first."""
    operations = [entry for entry in entries if isinstance(entry, Operation)]
    return (*(o for o in operations if o.op is Op.F), *reversed([o for o in operations if o.op is Op.BW]))


class ReorderingHost(StageHost):
    """Each step is by another order of the schedule; one that would give other bits is refused."""

    def open(self, engine: Any, plan: Plan) -> Any:
        worker, orders = super().open(engine, plan), iter(("zb", "gpipe", "zb-h2"))
        assert engine.adaptation == helixrt.Adaptation()
        following = worker.next_work

        def next_work() -> WorkOrder | None:
            order = following()
            if order is not None:
                in_order = build("1f1b", engine.stages, MICROBATCHES)
                with pytest.raises(ScheduleError, match="before BW.*micro-batch order"):
                    engine.prepare_schedule(replace(in_order, entries=tuple(map(last_first, in_order.entries))))
                engine.use_schedule(build(next(orders), engine.stages, MICROBATCHES))
            return order

        worker.next_work = next_work
        return worker


def test_a_model_whose_order_changes_every_step_has_the_same_bits(run_stages: Any) -> None:
    _, loss, batches = CASES["perceptron"]
    models = {host: [(perceptron(), loss()) for _ in range(2)] for host in (StageHost, ReorderingHost)}

    def stage(number: int, group: Any) -> list[Any]:
        options = {"schedule": "1f1b", "adapt": helixrt.Adaptation()}
        return [trained(made(number, 2, group), *models[made][number], batches(), **options) for made in models]

    for (state, told), (state_, told_) in run_stages(2, stage, timeout_s=240.0):
        assert told == told_ and len(told) == STEPS
        assert state.keys() == state_.keys() and all(torch.equal(value, state_[name]) for name, value in state.items())


def test_dropped_work_is_done_again_with_the_same_result() -> None:
    calm, disturbed = (trained(StageHost(dropped=dropped), perceptron(), mse_loss, vectors()) for dropped in (set(), {2, 3}))
    assert calm[1] == disturbed[1] and all(torch.equal(calm[0][name], disturbed[0][name]) for name in calm[0])


def test_stages_that_cut_differently_say_so(run_stages: Any) -> None:
    models = [Perceptron(4).double(), Perceptron(6).double()]

    def stage(number: int, group: Any) -> Any:
        return trained(StageHost(number, 2, group), models[number], mse_loss, vectors())

    with pytest.raises(DisagreementError, match=r"ranks cut the model differently: line \d+ is .* on rank 0 and .* on rank 1"):
        run_stages(2, stage)


# ---------------------------------------------------------------- what a stage has


def part_of(model: nn.Module, stage: int, stages: int, **options: Any) -> CapturedModel:
    """Of a model over stages, without the others."""
    (x,), named, target = vectors()[0]
    step = helixrt.compile(model, loss=mse_loss, microbatches=MICROBATCHES, **options).train_step
    place = StagePlace(stage, stages, None, FlightRecord("pp"))
    return CapturedModel(step, helixrt.ExampleBatch(x, target=target, **named), place, seed=5)


def test_a_model_on_meta_gets_the_same_weights_for_every_number_of_stages() -> None:
    def states(stages: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for stage in range(stages):
            with torch.device("meta"):
                model = Perceptron().double()
            found |= part_of(model, stage, stages).state_dict()
        return found

    whole = states(1)
    assert set(whole) == set(perceptron().state_dict()) and all(value.any() for value in whole.values())
    for stages in (2, 4):
        found = states(stages)
        assert set(found) == set(whole) and all(torch.equal(found[name], whole[name]) for name in whole)


def test_what_a_real_model_has_is_taken_and_the_rest_is_freed() -> None:
    model = perceptron()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    part = part_of(model, 1, 2)
    state = part.state_dict()
    assert 0 < len(state) < len(before) and all(torch.equal(state[name], before[name]) for name in state)
    assert {name for name, value in model.state_dict().items() if not value.is_meta} == set(state)


def real_bytes() -> dict[int, int]:
    """Of the memory of all tensors of this process, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not is_fake(each)]
    storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided and not each.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_a_stage_of_a_model_on_meta_holds_no_more_than_the_stage() -> None:
    before = real_bytes()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.empty(MICROBATCHES, 64)
    step = helixrt.compile(model, loss=mse_loss, microbatches=MICROBATCHES).train_step
    part = CapturedModel(step, helixrt.ExampleBatch(x, target=x), StagePlace(1, 4, None, FlightRecord("pp")))
    own = sum(parameter.nbytes for parameter in part.parameters())
    new = sum(size for address, size in real_bytes().items() if address not in before)
    assert own == 65 * 64 * 4 and own <= new <= own + x.nbytes + 64 < 2 * own  # nothing else but a seed or a constant


def test_parameters_without_a_gradient_are_not_trained() -> None:
    model = perceptron()
    model.spare = nn.Linear(3, 3)
    model.layers[3].bias.requires_grad_(False)
    first, second = (part_of(copy.deepcopy(model), stage, 2) for stage in range(2))
    assert {name for name, p in first.named_parameters() if not p.requires_grad} == {"spare.weight", "spare.bias"}
    assert [name for name, p in second.named_parameters() if not p.requires_grad] == ["layers.3.bias"]


def frozen_tied() -> nn.Module:
    model = gpt2()
    model.transformer.wte.weight.requires_grad_(False)  # the head's too
    return model


@pytest.mark.system
def test_a_frozen_parameter_that_two_stages_share_is_left_alone(run_stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "frozen tied", (frozen_tied, lambda: None, text))
    check_equal("frozen tied", *over_stages(run_stages, 2, "frozen tied"))


@pytest.mark.parametrize("what", ["frozen", "made trainable"])
def test_what_is_trained_is_decided_before_the_model_is_captured(what: str) -> None:
    model = perceptron()
    model.layers[3].bias.requires_grad_(what == "frozen")
    session = session_with(StageHost())
    (x,), named, target = vectors()[0]
    compiled = helixrt.compile(model, loss=mse_loss, microbatches=MICROBATCHES)
    part = session.parallelize(compiled, example=helixrt.ExampleBatch(x, target=target, **named))
    part.get_parameter("layers.3.bias").requires_grad_(what != "frozen")
    with pytest.raises(MisuseError, match=rf"layers\.3\.bias was {what} after session\.parallelize, which has captured"):
        session.register(model=part, optimizers=[torch.optim.SGD(part.parameters(), lr=0.1)])


def test_a_model_in_evaluation_mode_is_not_captured_for_training() -> None:
    with pytest.raises(MisuseError, match=r"the model is in evaluation mode, .* call model\.train\(\) before"):
        started(perceptron().eval())


def test_an_embedding_that_a_forward_scales_is_named() -> None:
    model = perceptron()
    model.add_module("rows", nn.Embedding(4, 2, max_norm=1.0))
    with pytest.raises(MisuseError, match=r"^rows is an embedding with max_norm=1: its forward changes its weight"):
        started(model)


def test_schedules_that_weave_are_refused_with_one_strand() -> None:
    model = helixrt.compile(perceptron(), loss=mse_loss, microbatches=MICROBATCHES, strands=1, schedule="dualpipev")
    with pytest.raises(ConfigError, match="strands=1: cannot be with schedule dualpipev, which weaves"):
        pipeline_schedule(model.train_step.options, 2)


def test_what_a_loss_trains_without_the_model_having_it_is_refused_in_one_line() -> None:
    """A misuse: ranks that start again would find the same."""
    other = nn.Parameter(torch.ones(()).double())
    with pytest.raises(MisuseError, match=r"that is no parameter of the model requires grad; change: make it a") as caught:
        started(loss=lambda output, target: mse_loss(output * other, target))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "lines"), [({"strands": 2}, 1), ({}, 0), ({"strands": 2, "schedule": "w"}, 0)])
def test_strands_that_were_asked_for_and_have_nothing_to_weave_are_said_once(options: Any, lines: int) -> None:
    host = StageHost()
    (x,), named, target = vectors()[0]
    model = helixrt.compile(perceptron(), loss=mse_loss, microbatches=MICROBATCHES, profile="estimate", **options)
    session_with(host).parallelize(model, example=helixrt.ExampleBatch(x, target=target, **named))
    assert [line.partition(":")[0] for line in host.said] == ["strands=2 has no effect"] * lines


# ---------------------------------------------------------------- wrong calls


def started(
    model: nn.Module | None = None, loss: Any = mse_loss, rate: float = 0.1, change: Callable[[Any], object] | None = None
) -> tuple[Any, Any]:
    session = session_with(StageHost())
    (x,), named, target = vectors()[0]
    compiled = helixrt.compile(model or perceptron(), loss=loss, microbatches=MICROBATCHES)
    if change is not None:
        change(compiled)
    part = session.parallelize(compiled, example=helixrt.ExampleBatch(x, target=target, **named))
    session.register(model=part, optimizers=[torch.optim.SGD(part.parameters(), lr=rate)])
    return session, part


WRONG: dict[str, tuple[Callable[[Any, Any, Any, Any], object], str]] = {
    "called": (lambda step, part, x, y: part(x), r"is not called: in a step use step\.train\(model, x, target=y\)"),
    "backward": (lambda step, part, x, y: step.backward(x.sum()), r"step\.backward was called for a model in stages"),
    "uneven": (lambda step, part, x, y: step.train(part, x[:7], target=y[:7], scale=x[:7]), "a multiple of microbatches=4"),
    "shape": (lambda step, part, x, y: step.train(part, x[:, :3], target=y, scale=x), r"argument 0 .* is .*\[2, 3\]"),
    "dtype": (lambda step, part, x, y: step.train(part, x.float(), target=y, scale=x), "is torch.float32.* not torch.float64"),
    "missing": (lambda step, part, x, y: step.train(part, x, target=y), "argument scale is in the example alone"),
    "unknown": (lambda step, part, x, y: step.train(part, x, target=y, scale=x, bias=x), "bias is in this one alone"),
}


def test_a_wrong_call_ends_in_one_clear_error() -> None:
    session, part = started()
    (step,) = (next(session.steps(vectors(), until=1)),)
    for (x,), named, target in step:
        for call, message in WRONG.values():
            with pytest.raises(MisuseError, match=message):
                call(step, part, x, target)
        step.train(part, x, target=target, **named)
    assert step.commit().committed


class Alterable(Perceptron):
    """A number, a buffer and a random layer that graphs have in them."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.factor, self.dropout = 2.0, nn.Dropout(0.5)
        self.register_buffer("passing", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(self.dropout(x) * self.factor * self.passing, scale)


ALTERED: dict[str, tuple[Callable[[Any, Any], object], str]] = {  # of the model and the session's part
    "eval": (lambda model, part: model.eval(), "the training mode of a module was changed"),
    "eval of a layer": (lambda model, part: model.dropout.eval(), "the training mode of a module was changed"),
    "eval of the part": (lambda model, part: part.eval(), "the training mode of a module was changed"),
    "buffer": (lambda model, part: setattr(model, "passing", model.passing * 2), "passing was changed after session"),
    "layer": (lambda model, part: model.layers.append(nn.Linear(WIDTH, WIDTH)), r"layers\.2 was changed"),
    "layer of the same kind": (
        lambda model, part: model.layers.__setitem__(0, nn.Linear(WIDTH, WIDTH)),
        r"layers\.0 was changed",
    ),
}


@pytest.mark.parametrize("case", ALTERED)
def test_a_model_that_was_changed_after_its_capture_is_not_trained_on(case: str) -> None:
    change, message = ALTERED[case]
    model = Alterable().double()
    session, part = started(model)
    steps = session.steps(vectors(), until=STEPS)
    for inputs, named, target in (step := next(steps)):
        step.train(part, *inputs, target=target, **named)
    assert step.commit().committed
    change(model, part)
    with pytest.raises(MisuseError, match=message):
        for inputs, named, target in (step := next(steps)):
            step.train(part, *inputs, target=target, **named)


def test_an_evaluation_leaves_modes_as_they_were() -> None:
    model = Alterable().double()
    session, part = started(model)
    ((x,), named, target), *_ = vectors()
    session.evaluate(lambda: (model.eval(), part.eval(), part.evaluate(x, target=target, **named))[-1], every=1)
    for step in session.steps(vectors(), until=STEPS):
        for inputs, others, goal in step:
            step.train(part, *inputs, target=goal, **others)
        assert step.commit().committed


class Looked(nn.Module):
    """With `sparse=True` its embedding has sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse), nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


def test_sparse_gradients_become_dense() -> None:
    batches: Batches = [((named["input_ids"],), {}, torch.ones(BATCH, LENGTH, 2).double()) for _, named, _ in text()]
    found, expected = (trained(StageHost(), Looked(sparse).double(), mse_loss, batches) for sparse in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_parameter_that_is_frozen_after_it_was_registered_is_named() -> None:
    with torch.device("meta"):
        model = Perceptron(layers=16).double()
    session, part = started(model)
    part.get_parameter("head.weight").requires_grad_(False)
    with pytest.raises(MisuseError, match=r"head\.weight\.requires_grad was changed after session"):
        for inputs, named, target in (step := next(session.steps(vectors(), until=STEPS))):
            step.train(part, *inputs, target=target, **named)


class Ruleless(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x + self.bias, scale)


def test_a_model_that_cannot_be_trained_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Ruleless().double()
    with pytest.raises(ConfigError, match="model=bias: is on the meta device, and no rule gives it values"):
        part_of(model, 0, 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "codegen": ({"codegen": "inductor"}, "codegen=inductor: a pipeline runs operators one by one"),
    "strict": ({"strict": False}, "strict=False: there is no plain loop for a pipeline"),
    "too few": ({"schedule": "1f1b", "microbatches": 1}, "microbatches=1: 1f1b needs one per stage"),
    "cuts": ({"cuts": ["layers.1", "layers.2"]}, "cuts=.*: must name 1 modules: 1f1b over mesh.pp=2 has 2 chunks"),
    "adapt": ({"adapt": "on"}, "adapt=on: must be a helixrt.Adaptation, or None"),
    "unknown": ({"schedule": "2f2b"}, "schedule=2f2b: must be auto, a Schedule, or one of gpipe, 1f1b"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_do_not_fit_are_refused(case: str) -> None:
    options, rule = REFUSED[case]
    with pytest.raises(ConfigError, match=rule):
        compiled = helixrt.compile(perceptron(), loss=mse_loss, **{"microbatches": MICROBATCHES, **options})
        session_with(StageHost(), mesh=Mesh(pp=2)).parallelize(compiled, example=helixrt.ExampleBatch(torch.zeros(8, WIDTH)))


def test_what_is_missing_is_said() -> None:
    session = session_with(StageHost(), mesh=Mesh(pp=2))
    compiled = helixrt.compile(perceptron(), loss=mse_loss)
    with pytest.raises(ConfigError, match=r"mesh\.pp=2: needs session\.parallelize\(helixrt\.compile\(model.*example="):
        session.parallelize(compiled)
    with pytest.raises(ConfigError, match="model=Perceptron: is not compiled"):
        session.parallelize(perceptron(), example=helixrt.ExampleBatch(torch.zeros(8, WIDTH)))
    with pytest.raises(ConfigError, match="schedule=zb: is for a pipeline"):
        helixrt.compile(perceptron(), loss=mse_loss, schedule="zb").train_step(torch.zeros(8, WIDTH), target=torch.zeros(8, 2))


def test_an_axis_that_no_graph_has_is_refused() -> None:
    compiled = helixrt.compile(perceptron(), loss=mse_loss, microbatches=MICROBATCHES)
    with pytest.raises(ConfigError, match=r"mesh\.dp_shard=2: must be 1 .*: FSDP2 gathers parameters in hooks"):
        session_with(StageHost(), mesh=Mesh(pp=2, dp_shard=2)).parallelize(
            compiled, example=helixrt.ExampleBatch(torch.zeros(8, WIDTH))
        )


def test_optimizers_of_whole_matrices_are_refused_over_tp() -> None:
    model = nn.Linear(4, 4, bias=False)
    for optimizer, why in ((torch.optim.Muon, "Muon needs whole matrices"), (torch.optim.Adafactor, "Adafactor does not work")):
        with pytest.raises(MisuseError, match=why):
            check_optimizers(Registered.of(model, [optimizer(model.parameters())]))
    check_optimizers(Registered.of(model, [torch.optim.AdamW(model.parameters())]))
