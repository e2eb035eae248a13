"""Two sides that train the same by turns: a helixrt run, and torch alone, each in processes of its own.

In: what each side's processes run, and the run's mesh. Out: an `Outcome` of each process. Blocks of steps alternate: one side
waits at the `Gate`, with its next batch, while the other one runs. Used by `helixrt bench train` and `helixrt bench hsdp`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from helixrt.errors import Fatal
from helixrt.job.sampler import StreamSampler
from helixrt.protocol.step.lineage import genesis
from helixrt.replica.contracts import Coordinate, RankSpec
from helixrt.replica.membership import serve_lighthouse
from helixrt.replica.run_keys import EXIT_KEY, done_key
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import TcpRunStore, host_store
from helixrt.timeouts import Timeouts
from helixrt.train.config import DataConfig
from helixrt.train.data import load_corpus, text_loader, training_windows

_RUN_S = 3600.0  # for a replica to end
_RESULT_S = 120.0  # from then on for each process's outcome
_EXIT_S = 60.0


class Gate:
    """Lets the sides, of `world` processes each, run blocks in turn. `pass_block(side)` is called by each process before a
    block."""

    def __init__(self, context: Any, rounds: int, world: int) -> None:
        self.rounds, self.world = rounds, world
        self._changed = context.Condition()
        self._turn = context.Value("i", 0, lock=False)
        self._arrived = context.Array("i", [0, 0], lock=False)

    def pass_block(self, side: int, block: int) -> None:
        """Report that `block` - 1 is done and wait for `block`'s turn. The order within a round alternates."""
        with self._changed:
            if block:
                self._arrived[side] += 1
                if self._arrived[side] == self.world:
                    self._arrived[side] = 0
                    self._turn.value += 1
                    self._changed.notify_all()
            if block > self.rounds:
                return
            mine = 2 * block + (side if block % 2 else 1 - side)
            if not self._changed.wait_for(lambda: self._turn.value >= mine, timeout=600):
                raise Fatal(f"the other side did not finish its block in 600 s (turn {self._turn.value}, waiting for {mine})")


class Stopwatch:
    """Passes the gate before each block and records how long the counted steps took. It is called with the position of each
    batch, once the batch was read. The first step of a block is not counted, since its preparation may overlap the wait."""

    def __init__(self, side: int, gate: Gate, block: int) -> None:
        self._side, self._gate, self._block = side, gate, block
        self._began = 0.0
        self.seconds: list[float] = []  # per counted step, by block

    def __call__(self, position: int) -> None:
        number, within = divmod(position, self._block)
        if within == 0:
            self.lap()
            self._gate.pass_block(self._side, number)
        elif within == 1:
            self._began = time.perf_counter()

    def lap(self) -> None:
        if self._began:
            self.seconds.append((time.perf_counter() - self._began) / (self._block - 1))


def text_batches(data: DataConfig, stream: int, streams: int, seed: int) -> Iterator[torch.Tensor]:
    """What a session of this seed reads on this stream with `text_loader`, without end: int64 [batch, seq_len + 1]. Raises
    ConfigError (data.path)."""
    windows = training_windows(load_corpus(data), data, streams)
    sampler = StreamSampler(len(windows), streams, stream, shuffle=True, seed=seed)
    loader = text_loader(windows, sampler, data.batch)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


@dataclass(frozen=True)
class Outcome:
    side: str
    rank: int
    seconds: list[float]  # per counted step, by block
    loss: float  # of the last batch


def run_two_sides(
    places: Sequence[Coordinate],
    plain: dict[str, Any],
    timeouts: Timeouts,
    rounds: int,
    ours: Callable[..., None],
    theirs: Callable[..., None],
    arguments: Sequence[Any],
) -> list[Outcome]:
    """Run both sides in as many processes each as there are `places`, the ranks of our run, whose configuration is `plain`.

    Our processes call `ours(spec, gate, results, *arguments)`, the others `theirs(rank, store's address, gate, results,
    *arguments)`; each puts one Outcome into `results`.
    """
    context = multiprocessing.get_context("spawn")
    world, replicas = len(places), 1 + max(at.replica for at in places)
    gate, results = Gate(context, rounds, world), context.Queue()
    server, address = host_store()
    store = TcpRunStore(address)
    RunLog(store).append(0, genesis("bench", replicas))
    lighthouse, lighthouse_address = serve_lighthouse(timeouts)
    with tempfile.TemporaryDirectory() as folder:
        epoch_s = time.time()
        specs = [RankSpec("bench", at, 0, address, lighthouse_address, folder, "bench", epoch_s, plain) for at in places]
        processes = [context.Process(target=ours, args=(spec, gate, results, *arguments)) for spec in specs]
        processes += [context.Process(target=theirs, args=(rank, address, gate, results, *arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            for replica in range(replicas):
                store.wait(done_key(replica), _RUN_S)
            store.put_if_absent(EXIT_KEY, "ok")
            outcomes = [results.get(timeout=_RESULT_S) for _ in processes]
            for process in processes:
                process.join(_EXIT_S)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            lighthouse.shutdown()
            del server
    return outcomes
