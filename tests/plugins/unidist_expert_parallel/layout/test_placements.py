"""Where the parameters of divided experts belong."""

from __future__ import annotations

from unidist.buffer import DType
from unidist.checkpoint.format.interface import WholeParameters
from unidist.mesh import REPLICA_AXES, SHARD_REPLICA_AXES
from unidist_expert_parallel.layout.placements import ExpertParameters


def test_a_rank_holds_rows_of_stacked_experts_and_some_of_a_list() -> None:
    places = ExpertParameters(["a.up"], {"b.experts": 8}, rank=1, size=4, inner=WholeParameters())
    stacked = places.placement("a.up", (2, 5, 3), DType.FLOAT32)
    assert (stacked.name, stacked.shape, stacked.box) == ("a.up", (8, 5, 3), ((2, 4), (0, 5), (0, 3)))
    assert stacked.local_shape == (2, 5, 3)
    listed = places.placement("b.experts.1.0.weight", (5, 3), DType.FLOAT32)
    assert (listed.name, listed.shape) == ("b.experts.3.0.weight", (5, 3))
    assert places.placement("b.router.weight", (8, 3), DType.FLOAT32).name == "b.router.weight"


def test_experts_are_on_one_rank_and_exchanged_with_their_holders() -> None:
    places = ExpertParameters(["a.up"], {"b.experts": 8}, rank=1, size=4, inner=WholeParameters())
    assert [places.copies(path) for path in ("a.up", "b.experts.0.weight", "b.router.weight")] == [1, 1, 4]
    axes = [places.gradient_axis(path) for path in ("a.up", "b.experts.0.weight", "b.router.weight")]
    assert axes == [SHARD_REPLICA_AXES, SHARD_REPLICA_AXES, REPLICA_AXES]
