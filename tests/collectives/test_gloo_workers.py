"""Gloo groups that helixrt makes have one worker thread: with two, torch corrupts the heap (`gloo_groups_private`)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from helixrt.collectives.gloo_groups_private import one_gloo_worker

TIMEOUT = timedelta(seconds=47)


@pytest.fixture
def gloo_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", distributed_c10d.ProcessGroupGloo)  # taken back at the end
    one_gloo_worker()
    one_gloo_worker()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def options_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options


@pytest.mark.usefixtures("gloo_group")
def test_every_way_to_a_gloo_group_gives_it_one_worker() -> None:
    apart = dist.new_group([0], timeout=2 * TIMEOUT)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert [options_of(group)._threads for group in (dist.group.WORLD, apart, *mesh.get_all_groups())] == [1] * 4
    assert [options_of(group)._timeout for group in (dist.group.WORLD, apart)] == [TIMEOUT, 2 * TIMEOUT]


@pytest.mark.usefixtures("gloo_group")
def test_collectives_in_flight_together_keep_their_results() -> None:
    ops, world = torch.ops._c10d_functional, dist.group.WORLD.group_name
    sent = [torch.full((count,), float(count)) for count in range(1, 40)]
    gathered = [ops.all_gather_into_tensor(x, 1, world) for x in sent]
    summed = [ops.all_reduce(x, "sum", world) for x in sent]
    for x, one, other in zip(sent, gathered, summed, strict=True):
        assert torch.equal(ops.wait_tensor(other), x) and torch.equal(ops.wait_tensor(one), x)


@pytest.mark.usefixtures("gloo_group")
def test_torch_takes_such_a_group_for_gloo() -> None:
    assert dist.get_backend() == "gloo"
    dist.monitored_barrier(timeout=TIMEOUT)  # asks whether the group is Gloo's
