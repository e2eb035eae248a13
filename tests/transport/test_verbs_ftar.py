"""FTAR over verbs: two processes on plain buffers, whose default NICs are cut while they exchange."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helixrt.lab.nics import NicPair

pytestmark = pytest.mark.rdma

STEPS, ELEMENTS = 8, 1 << 19  # 2 MiB a step


@pytest.fixture
def ranks(nic_pairs: list[NicPair]) -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.transport.verbs_ftar_rank", str(rank), str(STEPS), str(ELEMENTS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    yield started
    for each in started:
        each.kill()
        each.wait()


def hear(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    word = rank.stdout.readline().strip()
    assert word, f"rank ended with {rank.wait(30)}"
    return word


def tell(rank: subprocess.Popen[str], word: str) -> None:
    assert rank.stdin is not None
    print(word, file=rank.stdin, flush=True)


@pytest.mark.slow
def test_sums_are_those_of_an_undisturbed_run_bit_for_bit(ranks: list[subprocess.Popen[str]], nic_pairs: list[NicPair]) -> None:
    from tests.transport.verbs_ftar_rank import digest, gradient

    addresses = [hear(rank) for rank in ranks]
    for rank, address in zip(ranks, reversed(addresses), strict=True):
        tell(rank, address)
    for step in range(STEPS):
        expected = digest(gradient(0, step, ELEMENTS) + gradient(1, step, ELEMENTS))
        assert [hear(rank) for rank in ranks] == [expected, expected], f"step {step}"
        if step == 1:
            nic_pairs[0].down("a")
        elif step == 4:
            nic_pairs[0].heal()
    said = [json.loads(hear(rank)) for rank in ranks]
    for rank in ranks:
        tell(rank, "close")
    assert [rank.wait(30) for rank in ranks] == [0, 0]
    assert max(each["failovers"] for each in said) >= 1
