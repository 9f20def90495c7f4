"""The time of a step, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_plugins import predicted, problem

from unidist.cost_model.cluster import Cluster
from unidist.cost_model.collectives import Link, fastest
from unidist.cost_model.exchange_cost import BUCKET_BYTES
from unidist.cost_model.step_interface import SearchProblem
from unidist.errors import ConfigurationError
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.prediction import Prediction
from unidist_planner.step_time.reasons import bounds, holds, misses
from unidist_planner.step_time.transformer import TransformerWork

MODEL = Transformer(layers=8, hidden=512, vocabulary=1000, sequence=128, heads=8)
WORK = TransformerWork(MODEL, batch=64)
PARAMETERS = MODEL.figures().parameters
LINK = Link(10e-6, 1e9)
CLUSTER = Cluster(flops=1e12, ranks_per_host=8, inside=LINK, between=Link(50e-6, 1e9), overlap=0.0)
FORWARD = 2 * (12 * 512**2 * 8 + 512 * 1000) * 128 + 4 * 128**2 * 512 * 8
"""Floating-point operations of one sample: two for each element of a matrix and word, and attention's."""


def given(ranks: int, **changed: float) -> SearchProblem:
    return problem(WORK, ranks, cluster=replace(CLUSTER, **changed))  # type: ignore[arg-type]  # names of fields


def seconds(found: Prediction, name: str) -> float:
    return sum(part.seconds for part in found.parts if part.name == name)


def test_one_rank_computes_and_nothing_else() -> None:
    found = predicted("", given(1))
    assert found.seconds == pytest.approx(64 * 3 * FORWARD / 1e12)
    assert [part.name for part in found.parts] == ["arithmetic"]
    assert found.flops == pytest.approx(1e12)


def test_data_parallelism_divides_the_batch_and_adds_an_all_reduce() -> None:
    found = predicted("", given(4))
    assert seconds(found, "arithmetic") == pytest.approx(16 * 3 * FORWARD / 1e12)
    assert seconds(found, "gradients") == pytest.approx(fastest("allreduce", 4, PARAMETERS * 4, LINK)[1])
    assert found.seconds == pytest.approx(seconds(found, "arithmetic") + seconds(found, "gradients"))
    assert found.exchanging == pytest.approx(seconds(found, "gradients"))


def test_what_overlaps_costs_only_what_is_longer_than_the_last_backward_pass() -> None:
    whole = seconds(predicted("", given(4)), "gradients")
    backward = 16 * 2 * FORWARD / 1e12
    tail = fastest("allreduce", 4, BUCKET_BYTES, LINK)[1]
    assert tail > max(0.0, whole - backward)  # the last bucket is exchanged when the backward pass has ended
    assert seconds(predicted("", given(4, overlap=1)), "gradients") == pytest.approx(tail)
    # With smaller pieces the last backward pass is shorter.
    late = seconds(predicted("accumulate=16", given(4, overlap=1)), "gradients")
    assert late == pytest.approx(whole - backward / 16)
    assert seconds(predicted("data:overlap=false", given(4, overlap=1)), "gradients") == pytest.approx(whole)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_moves_as_much_as_an_all_reduce(stage: int) -> None:
    found = predicted(f"zero={stage}", given(4))
    expected = (
        fastest("reducescatter", 4, PARAMETERS * 4, LINK)[1],
        fastest("allgather", 4, PARAMETERS * 4, LINK)[1],
    )
    assert (seconds(found, "gradients"), seconds(found, "parameters")) == pytest.approx(expected)


def test_stage_3_gathers_in_every_pass_of_every_piece() -> None:
    gather = 8 * fastest("allgather", 4, PARAMETERS * 4 / 8, LINK)[1]
    assert seconds(predicted("zero=3", given(4)), "parameters") == pytest.approx(2 * gather)
    assert seconds(predicted("zero=3,accumulate=4", given(4)), "parameters") == pytest.approx(8 * gather)


def test_tensor_parallelism_adds_up_borders_four_times_a_block() -> None:
    found = predicted("tensor=4", given(8))
    border = 32 * 128 * 512 * 4
    assert seconds(found, "parts of blocks") == pytest.approx(8 * 4 * fastest("allreduce", 4, border, LINK)[1])
    assert seconds(found, "arithmetic") == pytest.approx(64 * 3 * FORWARD / 8 / 1e12)
    assert seconds(found, "gradients") == pytest.approx(fastest("allreduce", 2, PARAMETERS, LINK)[1])


def test_recomputation_costs_a_forward_pass_of_the_blocks_and_its_exchanges() -> None:
    plain, again = (predicted(line, given(4)) for line in ("tensor=4", "tensor=4,activations=recompute"))
    blocks = FORWARD - 2 * 128 * 512 * 1000
    assert seconds(again, "recomputation") == pytest.approx(64 * blocks / 4 / 1e12)
    assert seconds(again, "parts of blocks") == pytest.approx(1.5 * seconds(plain, "parts of blocks"))
    assert again.flops < plain.flops  # useful operations only


def test_a_pipeline_is_idle_by_its_schedule() -> None:
    """(p-1)/m of the time that its ranks compute, for 1F1B, where messages take no time."""
    free = replace(CLUSTER, inside=Link(0, 1e18))
    found = predicted("pipeline=4:schedule=1f1b:microbatches=16", problem(WORK, 4, cluster=free))
    computing = seconds(found, "arithmetic") + seconds(found, "uneven stages")
    assert seconds(found, "idle") == pytest.approx(3 / 16 * computing, rel=1e-6)
    assert seconds(found, "arithmetic") == pytest.approx(64 * 3 * FORWARD / 4 / 1e12)
    slow = predicted("pipeline=4:schedule=1f1b:microbatches=16", given(4))
    assert seconds(slow, "idle") > seconds(found, "idle")


def test_whole_blocks_do_not_divide_evenly() -> None:
    """Of 8 blocks and a head of 0.16 of them two go to each of four ranks, and the head to one in addition."""
    head = 2 * 128 * 512 * 1000 / ((FORWARD - 2 * 128 * 512 * 1000) / 8)
    found = predicted("pipeline=4:microbatches=16", given(4))
    most = (2 + head) / ((8 + head) / 4)
    assert seconds(found, "uneven stages") == pytest.approx(seconds(found, "arithmetic") * (most - 1))
    # With a head of three blocks the last of four ranks gets no block but it, and the others 8/3, that is 3.
    large = replace(WORK, transformer=replace(MODEL, vocabulary=int(3 / head * 1000)))
    found = predicted("pipeline=4:microbatches=16", problem(large, 4, cluster=CLUSTER))
    assert seconds(found, "uneven stages") == pytest.approx(seconds(found, "arithmetic") * (3 / (11 / 4) - 1), rel=0.01)


def test_the_order_of_strategies_does_not_matter() -> None:
    items = ["tensor=2", "pipeline=2:microbatches=4", "zero=1", "activations=recompute"]
    one, other = (predicted(",".join(line), given(8)) for line in (items, items[::-1]))
    assert one.seconds == pytest.approx(other.seconds, rel=1e-12)
    assert one.estimate.total() == pytest.approx(other.estimate.total(), rel=1e-12)


def test_memory_traffic_is_counted_where_its_bandwidth_is_known() -> None:
    found = predicted("", given(1, memory_bandwidth=1e9))
    kept = replace(MODEL, batch=64).bytes(4).blocks
    assert seconds(found, "memory traffic") == pytest.approx(3 * 2 * kept / 1e9)
    assert seconds(found, "update") == pytest.approx(PARAMETERS * (2 * (8 + 4) + 4) / 1e9)
    halved = predicted("zero=1", given(2, memory_bandwidth=1e9))
    assert seconds(halved, "update") == pytest.approx(seconds(found, "update") / 2)


def test_memory_is_the_estimator_s() -> None:
    found = predicted("pipeline=2:microbatches=4,tensor=2,zero=1", given(8))
    embedding = (1000 + 128) * 512  # on one stage, in addition to half of the blocks
    part = ((PARAMETERS - embedding) / 2 + embedding) / 2
    held = {line.name: line.num_bytes for line in found.estimate.lines}
    assert held["parameters"] == held["gradients"] == pytest.approx(4 * part)
    assert held["optimizer"] == pytest.approx(8 * part / 2)
    kept = replace(MODEL, batch=8).bytes(4)  # two micro-batches are held, of a pipeline of two
    assert held["activations"] == pytest.approx((kept.blocks + kept.outside) * (10 + 24 / 2) / 34)


@pytest.mark.parametrize("line", ["accumulate=3", "pipeline=2:microbatches=33", "accumulate=128"])
def test_a_batch_that_does_not_divide_is_an_error_with_the_equation(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"64 samples does not divide over .* = \d+"):
        predicted(line, given(2))


def test_more_stages_than_blocks_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"16 stages, but the model only 8 blocks"):
        predicted("pipeline=8:schedule=interleaved:microbatches=8", given(8))


def test_more_ranks_than_heads_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"tensor=16: the model has only 8 heads"):
        predicted("tensor=16", given(16))


def test_reasons_name_what_takes_time_and_memory() -> None:
    found = predicted("", given(4))
    assert "allreduce of" in bounds(found)
    assert "over 4 ranks of one host" in bounds(found)
    assert holds(found, 10e9).startswith(f"holds {found.estimate.total() / 1e9:.3g} of 10 GB")
    assert "it would take 100% of the best one's time" in misses(found, 1e6, found)
