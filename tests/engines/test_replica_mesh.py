"""Groups of a replica's ranks by axis, with real process groups of eight ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.errors import MisuseError
from tests.ranks_context import ranks_context

SIZES = {"pp": 2, "cp": 2, "tp": 2}


def _rank(rank: int, rendezvous: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(rendezvous, 8)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=8, timeout=timedelta(seconds=120))
    mesh = ReplicaMesh(SIZES, rank, timeout=timedelta(seconds=120))
    sums = {}
    for axes in (("pp",), ("cp",), ("tp",), ("dp_shard", "cp"), ("cp", "tp"), ("pp", "tp"), ()):
        group = mesh.group(*axes)
        assert group is not None
        bit = torch.tensor([1 << rank])
        dist.all_reduce(bit, group=group)
        sums[axes] = (int(bit), dist.get_rank(group), mesh.rank(*axes), group.size(), mesh.size(*axes))
    names = mesh.device_mesh().mesh_dim_names
    inner = mesh.inner("tp").gather(torch.tensor([rank]))
    apart, together = mesh.separate_group("cp", "tp"), mesh.group("cp", "tp")
    assert apart is not None and together is not None
    ranks = [dist.get_process_group_ranks(group) for group in (apart, together)]
    separate = (apart.group_name != together.group_name, *ranks, mesh.members("cp", "tp"), mesh.place_of(rank))
    alone = mesh.group("dp_shard") is None and mesh.separate_group("dp_shard") is None
    results.put((rank, sums, names, [int(each) for each in inner], alone, separate))
    results.close()
    results.join_thread()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.system
def test_groups_hold_the_ranks_that_differ_in_their_axes(tmp_path: Path) -> None:
    context = ranks_context()
    results: Any = context.Queue()
    workers = [context.Process(target=_rank, args=(rank, str(tmp_path / "store"), results)) for rank in range(8)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    places = list(product(range(2), repeat=3))  # pp, cp, tp by group rank
    number = {"pp": 0, "cp": 1, "tp": 2}
    for rank, sums, names, inner, alone, (differ, apart, together, told, at) in found:
        assert names == ("pp", "cp", "tp") and alone
        for axes, (bits, in_group, own, size, expected_size) in sums.items():
            free = {number[axis] for axis in axes or SIZES if axis in number}
            members = [
                r for r, place in enumerate(places) if all(place[i] == places[rank][i] for i in range(3) if i not in free)
            ]
            assert bits == sum(1 << member for member in members)
            assert in_group == own == members.index(rank) and size == expected_size == len(members)
        assert inner == [rank & ~1, rank | 1]
        assert differ and apart == together == told == [rank & 4 | other for other in range(4)]
        assert tuple(at[axis] for axis in SIZES) == places[rank] and at["dp_shard"] == 0


def test_a_replica_of_one_rank_has_no_groups() -> None:
    mesh = ReplicaMesh({})
    assert (mesh.size(), mesh.rank(), mesh.group("tp"), mesh.group()) == (1, 0, None, None)
    with pytest.raises(MisuseError, match="one rank"):
        mesh.device_mesh()
    with pytest.raises(ValueError, match="no axis"):
        mesh.rank("ep")
