"""How tests start ranks as processes: from a server that has imported torch, once for the whole session.

A process of `spawn` imports torch, seconds of compute for every rank of every test; one that the server forks has it. The
server runs one thread and holds nothing of a test; it ends with the session.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext

import pytest

from tests import programs

_IMPORTED = [
    "torch.distributed",
    "torch.distributed.fsdp",  # brings DTensor
    "helixrt.collectives",
    "helixrt.transport.auto",
    "helixrt.transport.tcp.endpoint",
    "helixrt.passes.capture",  # brings torch's tracer, which takes as long as torch itself
]


def ranks_context() -> ForkServerContext:
    if programs.refused:
        pytest.fail(programs.refused)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def names_drawn(request: pytest.FixtureRequest, test: Callable[..., None], **others: object) -> list[str]:
    """The parameter `name` of each of the test's cells that this run has; of those alone whose other parameters are these."""
    cells = [
        item.callspec.params for item in request.session.items if isinstance(item, pytest.Function) and item.function is test
    ]
    return [cell["name"] for cell in cells if all(cell[key] == value for key, value in others.items())]


def wrong_by_scenario(
    run: Callable[..., None], given: Sequence[tuple[object, ...]], names: Sequence[str], ends_one: str = ""
) -> dict[str, list[str]]:
    """By scenario, what each rank found wrong. Rank r is `run(r, *given[r], results)`; it puts (rank, scenario, what is wrong)
    for each scenario, but in `ends_one` one rank puts nothing."""
    context = ranks_context()
    results = context.Queue()
    ranks = [context.Process(target=run, args=(rank, *arguments, results)) for rank, arguments in enumerate(given)]
    for process in ranks:
        process.start()
    found: dict[str, list[str]] = {name: [] for name in names}
    try:
        expected = len(ranks) * len(names) - (ends_one in names)
        while sum(map(len, found.values())) < expected:
            number, name, wrong = results.get(timeout=300)
            found[name].append(wrong and f"rank {number}: {wrong}")
            if wrong:
                break
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()
    return found
