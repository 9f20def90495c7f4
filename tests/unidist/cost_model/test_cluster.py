"""How groups of a mesh lie on hosts, and what their collectives cost on two levels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unidist.cost_model.cluster import Cluster, Group
from unidist.cost_model.collectives import Link, fastest
from unidist.cost_model.step import Operation
from unidist.errors import ConfigurationError
from unidist.mesh import Mesh

CLUSTER = Cluster(flops=1e12, ranks_per_host=8, inside=Link(1e-6, 100e9), between=Link(10e-6, 10e9))
SHARE = Link(10e-6, 10e9 / 8)
"""What one of eight ranks has of the link between hosts."""


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ({"data": 32}, {"data": Group(8, 4)}),
        ({"pipeline": 4, "data": 8}, {"pipeline": Group(1, 4), "data": Group(8, 1)}),
        (
            {"pipeline": 2, "data": 4, "tensor": 4},
            {"pipeline": Group(1, 2), "data": Group(2, 2), "tensor": Group(4, 1)},
        ),
        ({"data": 4, "tensor": 8}, {"data": Group(1, 4), "tensor": Group(8, 1)}),
        ({"data": 2, "tensor": 16}, {"data": Group(1, 2), "tensor": Group(8, 2)}),
        ({"data": 10, "tensor": 3}, {"data": Group(2, 5), "tensor": Group(1, 3)}),
    ],
)
def test_groups_of_an_axis_on_hosts_of_eight(axes: dict[str, int], groups: dict[str, Group]) -> None:
    size = 1
    for number in axes.values():
        size *= number
    mesh = Mesh(axes, world_size=size)
    assert {axis: CLUSTER.group(mesh, axis) for axis in axes} == groups


def test_a_job_that_fits_on_one_host_stays_there() -> None:
    mesh = Mesh({"data": 3, "tensor": 2}, world_size=6)
    assert CLUSTER.group(mesh, "data") == Group(3, 1)
    assert CLUSTER.group(mesh, "pipeline") == Group(1, 1)


def test_an_all_reduce_over_hosts_has_two_levels() -> None:
    n = 1e9
    expected = (
        fastest("reducescatter", 8, n, CLUSTER.inside)[1]
        + fastest("allreduce", 4, n / 8, SHARE)[1]
        + fastest("allgather", 8, n, CLUSTER.inside)[1]
    )
    assert CLUSTER.seconds("allreduce", n, Group(8, 4)) == pytest.approx(expected)


@pytest.mark.parametrize("operation", ["reducescatter", "allgather"])
def test_scatter_and_gather_move_a_rank_s_part_between_hosts(operation: Operation) -> None:
    n = 1e9
    expected = fastest(operation, 8, n, CLUSTER.inside)[1] + fastest(operation, 4, n / 8, SHARE)[1]
    assert CLUSTER.seconds(operation, n, Group(8, 4)) == pytest.approx(expected)


def test_a_message_crosses_hosts_if_any_of_its_kind_does() -> None:
    assert CLUSTER.seconds("sendrecv", 1e9, Group(8, 1)) == pytest.approx(1e-6 + 0.01)
    assert CLUSTER.seconds("sendrecv", 1e9, Group(1, 8)) == pytest.approx(10e-6 + 0.8)
    assert CLUSTER.seconds("sendrecv", 1e9, Group(4, 2)) == pytest.approx(10e-6 + 0.8)


def test_messages_measured_apart_are_used_for_messages_alone() -> None:
    cluster = replace(CLUSTER, messages=Link(0.5, 100e9))
    assert cluster.seconds("sendrecv", 0, Group(2, 1)) == 0.5
    assert cluster.seconds("allreduce", 0, Group(2, 1)) < 1e-3


def test_one_rank_exchanges_nothing() -> None:
    assert CLUSTER.seconds("allreduce", 1e9, Group(1, 1)) == 0


@pytest.mark.parametrize("wrong", [{"flops": 0}, {"memory_bytes": -1}, {"ranks_per_host": 0}, {"overlap": 1.5}])
def test_numbers_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        replace(CLUSTER, **wrong)  # type: ignore[arg-type]  # names of fields
