"""Group ranks: every rank of a mesh has one, and no two have the same."""

from __future__ import annotations

import random

from helixrt.job.config import MeshConfig
from helixrt.job.places import coordinates, group_rank, group_world_size
from helixrt.replica.contracts import Coordinate
from helixrt.replica.rank_log import log_name, rank_label


def test_group_ranks_number_the_coordinates_of_any_mesh() -> None:
    rng = random.Random()
    for _ in range(50):
        mesh = MeshConfig(3, *(rng.randint(1, 4) for _ in range(4)))
        places = coordinates(mesh, 2)
        assert [group_rank(mesh, place) for place in places] == list(range(group_world_size(mesh)))
        assert len(set(places)) == len(places) and {place.replica for place in places} == {2}
        assert len({rank_label(place) for place in places}) == len(places), "labels name the files of a rank"


def test_stages_alone_are_numbered_as_before() -> None:
    assert coordinates(MeshConfig(2, 3), 1) == [Coordinate(1, 0), Coordinate(1, 1), Coordinate(1, 2)]
    assert [log_name(place, 0) for place in coordinates(MeshConfig(2, 1, 2), 0)] == ["r0.pp0.inc0.log", "r0.pp0.dp1.inc0.log"]
