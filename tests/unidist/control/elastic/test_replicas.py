"""The places of workers in worlds of whole replicas."""

from __future__ import annotations

import itertools

import pytest

from unidist.control.elastic.replicas import Candidate, ReplicaShape, Seating, seat
from unidist.mesh import Mesh

PIPELINE = ReplicaShape(outer=2)
TENSOR = ReplicaShape(inner=2)
BOTH = ReplicaShape(outer=2, inner=2)


def world(shape: ReplicaShape, num_replicas: int, lost: tuple[int, ...] = ()) -> list[Candidate]:
    """Return the survivors of a world in which worker N has rank N."""
    return [
        Candidate(rank, 0, shape.part(rank, num_replicas), shape.replica(rank, num_replicas))
        for rank in range(num_replicas * shape.size)
        if rank not in lost
    ]


@pytest.mark.parametrize(
    "axes",
    [
        {"pipeline": 2, "data": None},
        {"data": None, "tensor": 3},
        {"pipeline": 2, "data": None, "context": 2, "tensor": 2},
    ],
)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_ranks_are_those_of_the_mesh(axes: dict[str, int | None], num_replicas: int) -> None:
    size = 1
    for each in axes.values():
        size *= each or 1
    mesh = Mesh(axes, world_size=size * num_replicas)
    shape = ReplicaShape.of(mesh)
    assert shape.size == size
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        assert shape.replica(rank, num_replicas) == coordinates.pop("data")
        part, replica = shape.part(rank, num_replicas), shape.replica(rank, num_replicas)
        assert shape.rank(part, replica, num_replicas) == rank
        others = [other for other in range(mesh.world_size) if shape.part(other, num_replicas) == part]
        assert tuple(others) == mesh.group("data", rank=rank)


def test_newcomers_alone_get_the_ranks_in_their_order() -> None:
    found = seat(BOTH, [Candidate(number, number // 4) for number in range(8)], 4)
    assert found.workers == tuple(range(8))
    assert (found.num_replicas, found.over) == (2, ())


@pytest.mark.parametrize("shape", [PIPELINE, TENSOR])
@pytest.mark.parametrize("lost", range(4))
def test_without_a_newcomer_the_world_shrinks_by_a_replica_and_one_worker_is_over(
    shape: ReplicaShape, lost: int
) -> None:
    found = seat(shape, world(shape, 2, (lost,)), 2)
    assert found.num_replicas == 1
    assert len(found.over) == 1
    assert shape.part(found.over[0], 2) != shape.part(lost, 2)
    assert shape.replica(found.over[0], 2) == shape.replica(lost, 2)
    assert [shape.part(worker, 2) for worker in found.workers] == list(found.parts) == [0, 1]
    assert found.vacant == (shape.part(lost, 2),)


@pytest.mark.parametrize("shape", [PIPELINE, TENSOR, BOTH])
@pytest.mark.parametrize("num_lost", [1, 2])
def test_newcomers_take_exactly_the_places_of_the_lost(shape: ReplicaShape, num_lost: int) -> None:
    for lost in itertools.combinations(range(2 * shape.size), num_lost):
        newcomers = [Candidate(100 + number, 0) for number in range(num_lost)]
        found = seat(shape, [*world(shape, 2, lost), *newcomers], 2)
        assert found.num_replicas == 2
        assert [rank for rank, worker in enumerate(found.workers) if worker >= 100] == list(lost)
        assert all(found.workers[rank] == rank for rank in range(2 * shape.size) if rank not in lost)


def test_survivors_of_different_replicas_form_one() -> None:
    found = seat(PIPELINE, world(PIPELINE, 2, (0, 3)), 2)  # stage 0 of replica 0, and stage 1 of replica 1
    assert found == Seating(workers=(1, 2), parts=(0, 1), num_replicas=1, over=(), vacant=(0, 1))


def test_a_survivor_keeps_its_part_even_if_another_one_is_missing() -> None:
    found = seat(PIPELINE, world(PIPELINE, 2, (2, 3)), 2)  # both of stage 1
    assert (found.workers, found.num_replicas, found.over, found.vacant) == ((), 0, (0, 1), (1,))
    found = seat(PIPELINE, [*world(PIPELINE, 2, (2, 3)), Candidate(7, 0)], 2)
    assert (found.workers, found.over) == ((0, 7), (1,))


def test_there_are_never_more_replicas_than_the_most() -> None:
    found = seat(TENSOR, [*world(TENSOR, 2), Candidate(7, 0), Candidate(8, 0)], 2)
    assert (found.workers, found.over) == ((0, 1, 2, 3), (7, 8))


def test_a_world_grows_by_whole_replicas() -> None:
    shape = PIPELINE
    grown = seat(shape, [*world(shape, 1), Candidate(7, 0), Candidate(8, 0), Candidate(9, 0)], 4)
    assert grown.num_replicas == 2
    assert grown.workers == (0, 7, 1, 8)  # row-major: both of stage 0, then both of stage 1
    assert grown.over == (9,)


def test_newcomers_sit_beside_ranks_of_their_host() -> None:
    left = [Candidate(0, host=0, part=0, replica=0), Candidate(3, host=1, part=1, replica=1)]
    found = seat(TENSOR, [*left, Candidate(7, host=1), Candidate(8, host=0)], 2)
    assert found.workers == (0, 8, 7, 3)
