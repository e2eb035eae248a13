"""The overlap table of a machine: which operators of transformers hide behind which (DHelix, section 3.2, Figure 4).

In: the ranks of a process group that is ready, and sizes. Out: for a matrix product, attention forward and backward, three
collectives, and on a GPU copies to and from the host, the time of each alone and the overlap effectiveness factor of any two.
Collectives run inside hosts or between them, as the ranks are placed; every pair of two collectives has two groups of its own,
which do not wait for each other. A single rank has none. Two compute operators run in two threads of a CPU, or on two streams
of a GPU; so do copies, of a message between the GPU and the host's pinned memory. Of each pair the shorter is repeated until
both take about as long; a collective's repetitions are launched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from helixrt.errors import ConfigError
from helixrt.passes.groups import this_host
from helixrt.passes.measure import Operation, Stopwatch, Together
from helixrt.passes.ranks import Ranks

MOST = 64  # repetitions of the shorter of two operators

ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class Sizes:
    """Of a layer: tokens of a micro-batch (one sequence), hidden size, attention heads, dtype."""

    tokens: int
    hidden: int
    heads: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for key in ("tokens", "hidden", "heads"):
            if getattr(self, key) < 1:
                raise ConfigError(f"--{key}", getattr(self, key), "must be at least 1")
        if self.hidden % self.heads:
            raise ConfigError("--heads", self.heads, f"must divide the hidden size, {self.hidden}")


@dataclass(frozen=True)
class Table:
    """Operators by name with what they do and their time alone, and each pair of two (not in both orders)."""

    operators: tuple[str, ...]
    what: tuple[str, ...]
    alone_us: tuple[float, ...]
    pairs: dict[tuple[str, str], Together]
    ranks_per_host: tuple[int, ...]


@dataclass(frozen=True)
class _Row:
    """An operator to put into the table: `run` runs or launches it, `start` starts it beside something else."""

    name: str
    what: str
    run: Callable[[], Any]
    start: Callable[[], Any]
    communicates: bool = False


def overlap_table(sizes: Sizes, device: torch.device) -> Table:
    """Measure all; every rank of the default process group calls it. Raises ConfigError when ranks lie unevenly."""
    ranks = Ranks(dist.group.WORLD)
    watch = Stopwatch(device, ranks)
    hosts = [text.decode() for text in ranks.everyone(this_host().encode())]
    with ThreadPoolExecutor(1, "beside", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as thread:
        beside = _OnStream(device) if device.type == "cuda" else _InThread(thread)
        message = torch.randn(sizes.tokens, sizes.hidden, dtype=sizes.dtype, device=device)
        rows = [*_compute(sizes, device, beside), *_copies(message, beside), *_collectives(message, hosts)]
        with torch.no_grad():
            timed = [watch.collective(r.run) if r.communicates else watch.compute(r.run) for r in rows]
            alone = ranks.maxima([time.time_us for time in timed])
            pairs = {}
            for at, one in enumerate(rows):
                for behind, other in enumerate(rows[at:], at):
                    ratio = alone[behind] / alone[at]
                    often = min(MOST, round(ratio)) if ratio > 1 and not one.communicates else 1
                    started = several(other.start, min(MOST, round(1 / ratio)) if ratio < 1 else 1)
                    pairs[one.name, other.name] = watch.together(one.run, started, often)
    per_host = tuple(sorted((hosts.count(host) for host in set(hosts)), reverse=True))
    return Table(tuple(r.name for r in rows), tuple(r.what for r in rows), tuple(alone), pairs, per_host)


def several(start: Callable[[], Any], times: int) -> Callable[[], list[Any]]:
    """Starts it that often at once."""
    return lambda: [start() for _ in range(times)]


def _compute(sizes: Sizes, device: torch.device, beside: _OnStream | _InThread) -> list[_Row]:
    tokens, hidden, heads = sizes.tokens, sizes.hidden, sizes.heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=sizes.dtype, device=device) / hidden**0.5

    x, weight = random(tokens, hidden), random(hidden, 4 * hidden)
    query, key, value = (random(1, heads, tokens, hidden // heads).requires_grad_() for _ in range(3))
    gradient = torch.randn_like(query)

    def attention() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward() -> Callable[[], Any]:
        """Of a forward that runs now: autograd runs a backward on its forward's stream."""
        with torch.enable_grad():
            output = attention()
        return lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    shape = f"{heads} heads of {hidden // heads}, {tokens} tokens, causal"
    return [
        _Row("GEMM", f"[{tokens}, {hidden}] x [{hidden}, {4 * hidden}]", *beside.made(lambda: lambda: x @ weight)),
        _Row("FA", f"attention, {shape}", *beside.made(lambda: attention)),
        _Row("FA_BWD", f"attention's backward, {shape}", *beside.made(backward)),
    ]


def _copies(message: torch.Tensor, beside: _OnStream | _InThread) -> list[_Row]:
    """Of the message between a GPU and pinned memory of the host; none of a processor's."""
    if message.device.type == "cpu":
        return []
    host, back = torch.empty_like(message, device="cpu", pin_memory=True), torch.empty_like(message)
    what = f"{message.nbytes / 1024:g} KiB, the GPU"
    return [
        _Row("to host", f"{what} to pinned memory", *beside.made(lambda: lambda: host.copy_(message, non_blocking=True))),
        _Row("from host", f"{what} from pinned memory", *beside.made(lambda: lambda: back.copy_(host, non_blocking=True))),
    ]


def _collectives(message: torch.Tensor, hosts: Sequence[str]) -> list[_Row]:
    """All-gather inside hosts, all-to-all and all-reduce between them, as far as there are both."""
    count = dist.get_world_size()
    if count == 1:
        return []
    places = [[rank for rank in range(count) if hosts[rank] == host] for host in dict.fromkeys(hosts)]
    if len({len(place) for place in places}) > 1:
        raise ConfigError("ranks", count, f"must be equally many on every host, not {list(map(len, places))}")
    local = places if len(places[0]) > 1 else []
    cross = [list(across) for across in zip(*places, strict=True)] if len(places) > 1 else []
    rows = []
    for name, target, where in (
        ("all-gather", ops.all_gather_into_tensor.default, local or cross),
        ("all-to-all", ops.all_to_all_single.default, cross or local),
        ("all-reduce", ops.all_reduce.default, cross or local),
    ):
        size = len(where[0])
        sent = message[: message.shape[0] // size * size] if name == "all-to-all" else message
        each = [sent.shape[0] // size] * size
        extra: tuple[Any, ...] = {"all-gather": (size,), "all-to-all": (each, each), "all-reduce": ("sum",)}[name]
        runs = [Operation(target, [((sent, *extra, _own(where)), {})]) for _ in range(2)]
        place = "local" if where is local else "cross"
        what = f"{sent.numel() * sent.element_size() / 1024:g} KiB of each of {size} ranks, "
        what += "inside hosts" if where is local else "between hosts"
        rows.append(_Row(f"{name} {place}", what, runs[0], runs[1], communicates=True))
    return rows


def _own(where: Sequence[Sequence[int]]) -> str:
    """The name of this rank's one of new groups."""
    mine = None
    for members in where:
        group = dist.new_group(list(members))
        if isinstance(group, dist.ProcessGroup):  # else this rank is none of its members
            mine = group
    assert mine is not None, "every rank is in one of the groups"
    return str(mine.group_name)


class _Joined:
    """Something a thread does."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class _InThread:
    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.thread = thread

    def made(self, make: Callable[[], Callable[[], Any]]) -> tuple[Callable[[], Any], Callable[[], _Joined]]:
        """What runs an operator, and what starts it beside others."""
        run = make()
        return run, lambda: _Joined(self.thread.submit(run))


class _OnStream:
    """Something the second stream does; waiting makes the current stream wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def made(self, make: Callable[[], Callable[[], Any]]) -> tuple[Callable[[], Any], Callable[[], _OnStream]]:
        """What runs an operator on the current stream, and what starts it on the second one."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run = make()

        def start() -> _OnStream:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                run()
            return self

        return make(), start

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)
