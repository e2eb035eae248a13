"""One suite for every `Engine`: a plain model, the pipeline on one rank, on two, with tied weights, with two chunks per stage.

A test gives `on_ranks` a body that gets `make(seed=..., microbatches=...)`; it runs on every rank of a
replica at once.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helixrt.bench._job_engine import pipeline_engine
from helixrt.errors import Fatal
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.replica.contracts import BatchEngine, State, layout_of
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig

BATCH, SEQ, VOCAB = 8, 6, 16
Make = Callable[..., BatchEngine]
OnRanks = Callable[[Callable[[Make], Any]], list[Any]]


def batch_at(position: int) -> torch.Tensor:
    """Counting upwards from random starts: something to learn."""
    starts = torch.randint(0, VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(position))
    return (starts + torch.arange(SEQ + 1)) % VOCAB


@pytest.fixture(params=["plain", "pipeline-1", "pipeline-2", "pipeline-2-tied", "pipeline-2-tied-folded"])
def on_ranks(request: pytest.FixtureRequest, run_stages: Any, plain_engine: Any, captured_once: None) -> OnRanks:
    kind, *rest = request.param.split("-")
    stages = int(rest[0]) if rest else 1
    schedules = ("zbv", "w") if "folded" in rest else ("1f1b", "gpipe")

    def run(body: Callable[[Make], Any]) -> list[Any]:
        def rank(stage: int, group: Any) -> Any:
            made: list[BatchEngine] = []

            def make(seed: int = 0, microbatches: int = 2, schedule: int = 0) -> BatchEngine:
                if kind == "plain":
                    made.append(plain_engine(batch_at, vocab=VOCAB, seed=seed))
                else:
                    made.append(
                        pipeline_engine(
                            ModelConfig(layers=4, dim=8, heads=2, kv_heads=2, ffn=16, vocab=VOCAB, tied="tied" in rest),
                            OptimConfig(lr=1e-2, warmup_steps=1, bucket_bytes=1024),
                            ScheduleConfig(schedules[schedule], microbatches),
                            batch=BATCH,
                            seq_len=SEQ,
                            steps=100,
                            seed=seed,
                            stage=stage,
                            stages=stages,
                            group=group if stages > 1 else None,
                            batch_at=batch_at,
                            validation=lambda i: batch_at(10_000 + i),
                            record=FlightRecord(f"pp{stage}"),
                        )
                    )
                return made[-1]

            result = body(make)
            for engine in made:
                engine.close()
                engine.close()
            return result

        return run_stages(stages, rank)

    return run


def copies(tensors: Any) -> Any:
    return {n: t.clone() for n, t in tensors.items()} if hasattr(tensors, "items") else [t.clone() for t in tensors]


def copy_of(state: State) -> State:
    return State(copies(state.tensors), dict(state.scalars))


def same(a: Any, b: Any) -> bool:
    if hasattr(a, "items"):
        return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def record_of(step: int, contributors: int = 1) -> CommitRecord:
    return CommitRecord(step, step, "", tuple((r, 0) for r in range(contributors)), {0: step}, "run")


def quiet(bucket: int) -> None:
    pass


def test_layouts_follow_the_model_alone_and_that_of_the_state_changes_in_an_update_alone(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine = make(seed=1)
        buckets, state = [(b.shape, b.dtype) for b in engine.buckets], layout_of(engine.state().tensors)
        other = make(seed=2, microbatches=4, schedule=1)  # the layout follows neither seed nor schedule
        assert [(b.shape, b.dtype) for b in other.buckets] == buckets
        assert layout_of(other.state().tensors) == state
        later = []
        for step in (1, 2):
            engine.run(step, quiet)
            engine.apply(record_of(step), copies(engine.buckets))
            assert [(b.shape, b.dtype) for b in engine.buckets] == buckets
            later.append(layout_of(engine.state().tensors))
        assert later[0] == later[1] and set(state) <= set(later[0])  # an optimizer has no state before its first step
        assert all(b.dim() == 1 and b.is_contiguous() for b in engine.buckets)

    on_ranks(body)


def test_run_hands_out_each_bucket_once_with_its_final_value(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine = make()
        orders = []
        before = copies(engine.state().tensors)
        for position in (0, 1, 2):
            seen: dict[int, torch.Tensor] = {}
            caller = threading.get_ident()

            def on_bucket(index: int, seen: dict[int, torch.Tensor] = seen, caller: int = caller) -> None:
                assert index not in seen and threading.get_ident() == caller
                seen[index] = engine.buckets[index].clone()

            engine.run(position, on_bucket)
            assert sorted(seen) == list(range(len(engine.buckets)))
            assert all(torch.equal(seen[i], b) for i, b in enumerate(engine.buckets))
            assert any(b.any() for b in engine.buckets)
            orders.append(list(seen))
        assert orders[0] == orders[1] == orders[2]
        assert same(engine.state().tensors, before)

    on_ranks(body)


def test_run_gives_the_same_bits_again_and_the_same_loss_everywhere(on_ranks: OnRanks) -> None:
    def body(make: Make) -> Any:
        engine = make()
        first = engine.run(4, quiet)
        buckets = copies(engine.buckets)
        engine.run(5, quiet)
        assert not same(engine.buckets, buckets)
        assert engine.run(4, quiet) == first and same(engine.buckets, buckets)
        assert first.tokens == BATCH * SEQ and 0 < first.loss < 2 * math.log(VOCAB)
        return first

    assert len(set(on_ranks(body))) == 1


def test_apply_reads_reduced_alone(on_ranks: OnRanks) -> None:
    def body(make: Make) -> Any:
        engine, twin = make(), make()
        engine.run(0, quiet)
        buckets = copies(engine.buckets)
        reduced = [3 * b for b in buckets]  # another value than the engine's own, large enough to be clipped
        kept = copies(reduced)
        update = engine.apply(record_of(1), reduced)
        assert same(reduced, kept)
        assert twin.apply(record_of(1), reduced) == update  # this one has never computed
        assert same(engine.state().tensors, twin.state().tensors)
        # replaying kept sums needs no work between
        again = [engine.apply(record_of(2), reduced), engine.apply(record_of(3), kept)]
        assert [twin.apply(record_of(2), kept), twin.apply(record_of(3), reduced)] == again
        assert same(engine.state().tensors, twin.state().tensors)
        engine.run(0, quiet)
        assert not same(engine.buckets, buckets)
        return update

    assert len(set(on_ranks(body))) == 1


def test_apply_divides_the_sums_by_the_contributors_and_leaves_them(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine, twin = make(), make()
        engine.run(0, quiet)
        local = copies(engine.buckets)
        sums = [4 * b for b in local]
        kept = copies(sums)
        for step in (1, 2):  # four is a power of two: the division is exact
            assert engine.apply(record_of(step, contributors=4), sums) == twin.apply(record_of(step), local)
        assert same(sums, kept) and same(engine.state().tensors, twin.state().tensors)

    on_ranks(body)


def test_a_record_that_was_not_applied_leaves_parameters_and_gradients(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine = make()
        engine.run(0, quiet)
        state, buckets = copies(engine.state().tensors), copies(engine.buckets)
        assert engine.apply(dataclasses.replace(record_of(1), applied=False), None) is None
        assert same(engine.state().tensors, state) and same(engine.buckets, buckets)

    on_ranks(body)


def test_state_and_load_carry_on_bit_for_bit(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine, other = make(seed=1), make(seed=2)

        def train(which: BatchEngine, steps: range) -> None:
            for step in steps:
                which.run(step, quiet)
                which.apply(record_of(step), copies(which.buckets))

        train(engine, range(1, 4))
        snapshot = copy_of(engine.state())
        train(engine, range(4, 7))
        assert not same(engine.state().tensors, snapshot.tensors)  # the copies are copies, the state is live
        train(other, range(1, 2))
        other.load(snapshot)
        assert same(other.state().tensors, snapshot.tensors) and other.state().scalars == snapshot.scalars
        train(other, range(4, 7))
        assert same(other.state().tensors, engine.state().tensors)

    on_ranks(body)


def test_an_incomplete_state_is_refused(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine = make(seed=1)
        found = copy_of(make(seed=2).state())
        before = copies(engine.state().tensors)
        shards = dict(found.tensors)
        del shards[next(reversed(shards))]
        with pytest.raises(Fatal, match="lacks"):
            engine.load(State(shards, found.scalars))
        assert same(engine.state().tensors, before)

    on_ranks(body)


def test_evaluation_is_repeatable_and_changes_nothing(on_ranks: OnRanks) -> None:
    def body(make: Make) -> Any:
        engine = make()
        engine.run(0, quiet)
        state, buckets = copies(engine.state().tensors), copies(engine.buckets)
        first = engine.evaluate(3)
        assert engine.evaluate(3) == first and first[1] == 3 * BATCH * SEQ
        assert same(engine.state().tensors, state) and same(engine.buckets, buckets)
        return first

    assert len(set(on_ranks(body))) == 1


def test_training_learns(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine = make()
        before, _ = engine.evaluate(2)
        for step in range(1, 61):
            engine.run(step, quiet)
            engine.apply(record_of(step), copies(engine.buckets))
        after, _ = engine.evaluate(2)
        assert after < 0.7 * before

    on_ranks(body)


def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_update(on_ranks: OnRanks) -> None:
    def body(make: Make) -> None:
        engine = make()
        engine.run(0, quiet)
        before = copies(engine.state().tensors)
        reduced = copies(engine.buckets)
        reduced[-1][0] = float("nan")
        with pytest.raises(Fatal, match="not finite"):
            engine.apply(record_of(1), reduced)
        assert same(engine.state().tensors, before)

    on_ranks(body)
