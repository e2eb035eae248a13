"""The limits of catch-up fit into the memory, whatever the sizes, and use it."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from helixrt.errors import ConfigError
from helixrt.protocol.catchup_memory import GB, SERVED, CatchupMemory, catchup_memory, required_bytes

SIZES = st.integers(0, 1 << 42)


def try_it(memory: int, reduced: int, state: int, replicas: int, limit: int) -> CatchupMemory | None:
    try:
        return catchup_memory(memory, reduced, state, replicas, limit)
    except ConfigError:
        return None


@given(SIZES, SIZES, SIZES, st.integers(2, 2000), st.integers(0, 100))
@example(0, 0, 0, 2, 16)
def test_what_is_allowed_fits_and_one_more_would_not(memory: int, reduced: int, state: int, replicas: int, limit: int) -> None:
    found = try_it(memory, reduced, state, replicas, limit)
    assume(found is not None)
    assert found is not None
    assert min(1, limit) <= found.replay <= limit and 1 <= found.snapshots <= replicas - 1
    assert required_bytes(found.replay, found.snapshots, reduced, state) <= memory
    if found.replay < limit:
        assert required_bytes(found.replay + 1, 1, reduced, state) > memory
    if found.snapshots < replicas - 1:
        assert required_bytes(0, found.snapshots + 1, reduced, state) > memory


@given(SIZES, SIZES, SIZES, st.integers(2, 2000), st.integers(0, 100))
def test_it_is_refused_only_when_the_least_does_not_fit(
    memory: int, reduced: int, state: int, replicas: int, limit: int
) -> None:
    least = (SERVED + min(1, limit)) * reduced + state
    assert (try_it(memory, reduced, state, replicas, limit) is None) == (memory < least)


@given(SIZES, SIZES, st.integers(2, 8), st.integers(0, 32))
def test_the_value_in_the_message_is_enough(reduced: int, state: int, replicas: int, limit: int) -> None:
    assume(reduced + state > 0)
    with pytest.raises(ConfigError, match=r"catchup\.memory_gb=0: must be at least") as refused:
        catchup_memory(0, reduced, state, replicas, limit)
    said = float(str(refused.value).split("at least ")[1].split(":")[0])
    assert try_it(round(said * GB), reduced, state, replicas, limit) is not None


@given(SIZES, SIZES, SIZES, SIZES, st.integers(2, 64), st.integers(0, 64))
def test_more_memory_never_allows_less(memory: int, more: int, reduced: int, state: int, replicas: int, limit: int) -> None:
    small, large = (try_it(m, reduced, state, replicas, limit) for m in (memory, memory + more))
    if small is not None:
        assert large is not None and large.replay >= small.replay and large.snapshots >= small.snapshots


def test_a_model_of_a_gigabyte_of_gradients() -> None:
    """Adam: the state is three times the parameters."""
    assert catchup_memory(16 * GB, GB, 3 * GB, 4, 16) == CatchupMemory(replay=11, snapshots=3)
    assert catchup_memory(8 * GB, GB, 3 * GB, 4, 16) == CatchupMemory(replay=3, snapshots=2)
    with pytest.raises(ConfigError, match="one state .3.000 GiB. and 3 reduced gradient sets .1.000 GiB each"):
        catchup_memory(4 * GB, GB, 3 * GB, 4, 16)


def test_a_replica_alone_needs_no_memory() -> None:
    assert catchup_memory(0, GB, GB, 1, 16) == CatchupMemory(0, 1)
