"""The arithmetic of ranks on named axes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.errors import ConfigurationError, UsageError
from unidist.mesh import REPLICA_AXES, SAMPLE_AXES, SHARD_REPLICA_AXES, Mesh


def test_the_first_axis_is_outermost() -> None:
    mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2}, world_size=8)
    assert mesh.coordinates(5) == {"pipeline": 1, "data": 0, "tensor": 1}
    assert mesh.group("tensor", rank=5) == (4, 5)
    assert mesh.group("data", rank=5) == (5, 7)
    assert mesh.group("pipeline", rank=5) == (1, 5)
    assert repr(mesh) == "Mesh(pipeline=2, data=2, tensor=2)"


def test_one_open_size_takes_what_is_left_over() -> None:
    mesh = Mesh({"pipeline": 3, "data": None}, world_size=12)
    assert mesh.axes == {"pipeline": 3, "data": 4}
    assert Mesh({"data": None}, world_size=1).size("data") == 1


def test_an_axis_that_is_not_there_has_size_one_and_a_group_of_one() -> None:
    mesh = Mesh({"data": None}, world_size=4)
    assert mesh.size("tensor") == 1
    assert mesh.group("tensor", rank=2) == (2,)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_groups_of_an_axis_divide_the_ranks(sizes: list[int]) -> None:
    mesh = Mesh({f"axis{i}": size for i, size in enumerate(sizes)}, world_size=math.prod(sizes))
    positions = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)]
    assert positions == list(itertools.product(*map(range, sizes)))
    for axis in mesh.axes:
        groups = {mesh.group(axis, rank=rank) for rank in range(mesh.world_size)}
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
        for group in groups:
            assert len(group) == mesh.size(axis)
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(mesh.size(axis)))
            assert all(mesh.group(axis, rank=rank) == group for rank in group)


@pytest.mark.parametrize(
    ("axes", "world_size", "message"),
    [
        (
            {"pipeline": 2, "tensor": 3, "data": None},
            8,
            r"pipeline\(2\) \* tensor\(3\) = 6 does not divide world_size 8\. Use tensor=2, or launch 6 processes\.",
        ),
        ({"data": 3}, 8, r"data\(3\) = 3 is not world_size 8\. Launch 3 processes"),
        ({"tensor": 0, "data": None}, 8, "tensor=0: the size of a mesh axis is at least 1"),
        ({"tensor": -2, "data": None}, 8, "tensor=-2"),
        ({"data": None, "tensor": None}, 8, "data and tensor are both open"),
        ({"tensor": 5, "data": None}, 3, r"tensor\(5\) = 5 does not divide world_size 3"),
    ],
)
def test_sizes_that_do_not_fit_print_the_equation(axes: dict[str, int | None], world_size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Mesh(axes, world_size=world_size)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_a_usage_error(rank: int) -> None:
    mesh = Mesh({"data": None}, world_size=4)
    with pytest.raises(UsageError, match=f"rank {rank} is not in this mesh of 4 ranks"):
        mesh.coordinates(rank)
    with pytest.raises(UsageError):
        mesh.group("data", rank=rank)


class TestCompositeAxes:
    MESH = Mesh(
        {"pipeline": 2, "data": 2, "expert": 2, "context": 2, "tensor": 2},
        world_size=32,
        divides={"expert": ("samples", "model"), "context": ("sequence",)},
    )

    def test_samples_are_divided_over_data_and_experts(self) -> None:
        assert self.MESH.members(SAMPLE_AXES) == ("data", "expert")
        assert self.MESH.group(SAMPLE_AXES, rank=3) == (3, 7, 11, 15)

    def test_gradients_over_the_sequence_too(self) -> None:
        assert self.MESH.members(REPLICA_AXES) == ("data", "expert", "context")
        assert self.MESH.group(REPLICA_AXES, rank=17) == tuple(range(17, 32, 2))

    def test_those_of_experts_over_the_ranks_that_have_the_same(self) -> None:
        assert self.MESH.members(SHARD_REPLICA_AXES) == ("data", "context")
        assert self.MESH.group(SHARD_REPLICA_AXES, rank=0) == (0, 2, 8, 10)

    def test_every_rank_has_its_place(self) -> None:
        for axis in (SAMPLE_AXES, REPLICA_AXES, SHARD_REPLICA_AXES, "tensor", "missing"):
            for rank in range(32):
                assert self.MESH.group(axis, rank=rank)[self.MESH.place(axis, rank=rank)] == rank

    def test_the_model_is_divided_along_experts_but_not_the_sequence(self) -> None:
        assert self.MESH.model_axes == ("pipeline", "expert", "tensor")

    @pytest.mark.parametrize("axis", [SAMPLE_AXES, REPLICA_AXES, SHARD_REPLICA_AXES])
    def test_they_are_the_data_axis_where_nothing_else_counts(self, axis: str) -> None:
        mesh = Mesh({"pipeline": 2, "data": None}, world_size=8)
        assert mesh.members(axis) == ("data",)
        assert (mesh.size(axis), mesh.group(axis, rank=5)) == (4, (4, 5, 6, 7))
