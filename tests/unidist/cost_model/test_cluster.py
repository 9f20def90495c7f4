"""How groups of a mesh lie on hosts, and what their collectives cost on two levels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unidist.cost_model.cluster import Cluster, Group
from unidist.cost_model.collectives import Link, fastest
from unidist.cost_model.efficiency import BETWEEN_HOSTS, PUBLISHED, WHOLE, Efficiency
from unidist.cost_model.step import Operation
from unidist.errors import ConfigurationError
from unidist.mesh import REPLICA_AXES, Mesh

CLUSTER = Cluster(
    flops=1e12,
    ranks_per_host=8,
    inside=Link(1e-6, 100e9),
    between=Link(10e-6, 10e9),
    efficiency_between=WHOLE,
    rings=False,
)
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


@pytest.mark.parametrize("operation", ["reducescatter", "allgather"])
def test_a_ring_through_hosts_pays_every_step_and_its_slowest_link(operation: Operation) -> None:
    rings, n = replace(CLUSTER, rings=True), 1e9
    assert rings.seconds(operation, n, Group(8, 4)) == pytest.approx(31 * 10e-6 + 31 / 32 * n / 10e9)
    # Two of eight ranks have a quarter of the host's link.
    assert rings.seconds(operation, n, Group(2, 4)) == pytest.approx(7 * 10e-6 + 7 / 8 * n / 2.5e9)
    quick = replace(rings, between=Link(10e-6, 1e12))
    assert quick.seconds(operation, n, Group(8, 4)) == pytest.approx(31 * 10e-6 + 31 / 32 * n / 100e9)


def test_small_gathers_over_many_ranks_are_all_latency() -> None:
    rings = replace(CLUSTER, rings=True)
    assert rings.seconds("allgather", 1e6, Group(8, 192)) > 0.99 * 1535 * 10e-6
    assert CLUSTER.seconds("allgather", 1e6, Group(8, 192)) < 1e-3


def test_an_all_to_all_over_hosts_is_bound_by_what_leaves_the_host() -> None:
    n = 1e9
    assert CLUSTER.seconds("alltoall", n, Group(8, 1)) == pytest.approx(7 * 1e-6 + 7 / 8 * n / 100e9)
    assert CLUSTER.seconds("alltoall", n, Group(8, 4)) == pytest.approx(3 * 10e-6 + 3 / 4 * n / 1.25e9)


def test_collectives_between_hosts_reach_a_part_of_the_bandwidth_by_their_size() -> None:
    default = replace(CLUSTER, efficiency_between=BETWEEN_HOSTS)
    seconds, whole = (each.seconds("allreduce", 1e9, Group(1, 4)) for each in (default, CLUSTER))
    assert (whole - 6e-5) / (seconds - 6e-5) == pytest.approx(PUBLISHED, rel=1e-3)
    measured = replace(CLUSTER, efficiency_between=Efficiency.of([(1e8, 0.8), (1e6, 0.2)]))
    parts = [
        (CLUSTER.seconds("allgather", n, Group(1, 2)) - 1e-5) / (measured.seconds("allgather", n, Group(1, 2)) - 1e-5)
        for n in (1e3, 1e6, 1e7, 1e8, 1e12)
    ]
    assert parts == pytest.approx([0.2, 0.2, 0.5, 0.8, 0.8])
    assert measured.seconds("allgather", 1e9, Group(8, 1)) == CLUSTER.seconds("allgather", 1e9, Group(8, 1))


@pytest.mark.parametrize("points", [(), ((2.0, 0.5), (1.0, 0.5)), ((0.0, 0.5),), ((1.0, 0.0),)])
def test_efficiencies_are_checked(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigurationError, match="efficiency"):
        Efficiency(points)


def test_replicas_are_counted_over_several_axes() -> None:
    mesh = Mesh({"data": 4, "context": 2, "tensor": 8}, world_size=64, divides={"context": ("sequence",)})
    assert CLUSTER.group(mesh, REPLICA_AXES) == Group(1, 8)
    mesh = Mesh({"data": 4, "context": 2, "tensor": 4}, world_size=32, divides={"context": ("sequence",)})
    assert CLUSTER.group(mesh, REPLICA_AXES) == Group(2, 4)


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


def test_pushes_are_bounded_by_the_busiest_link() -> None:
    n = 1e9
    inside = Group(8, 1)  # a server of one host receives what 8 ranks send, each by its own connection
    assert CLUSTER.seconds("push", n, inside, servers=2) == pytest.approx(1e-6 + 4 * n / 100e9)
    assert CLUSTER.seconds("push", n, inside, servers=16) == pytest.approx(1e-6 + n / 100e9)
    hosts = Group(8, 4)  # 8 ranks of a host send all but the fourth that stays
    assert CLUSTER.seconds("push", n, hosts, servers=4) == pytest.approx(10e-6 + 8 * n * 3 / 4 / 10e9)
    assert CLUSTER.seconds("fetch", n, hosts, servers=1) == pytest.approx(10e-6 + 24 * n / 10e9)
