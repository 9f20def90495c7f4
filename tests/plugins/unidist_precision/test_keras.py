"""Precision in Keras: what is computed in 16 bits, that nothing vanishes, and that all ranks skip together."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

import precision_keras
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


def test_digits_are_learnt_as_well_in_16_bits_as_in_32(rank_pool: RankPoolFactory) -> None:
    pytest.importorskip("sklearn")
    pool = rank_pool(2)
    plain = pool.run(precision_keras.digits, ("precision=fp32",))
    assert plain[0]["accuracy"] > 0.85
    assert plain[0]["computed"] == "float32"
    for line, computed, kept, skipped, built in (
        ("bf16", "bfloat16", "float32", None, False),
        ("fp16,clip_norm=5", "float16", "float32", 0, True),
        ("fp16,zero=2", "float16", "float16", 0, True),
    ):
        found = pool.run(precision_keras.digits, (f"precision={line}",), {"built": built})
        assert found[0] == found[1]
        assert abs(found[0]["accuracy"] - plain[0]["accuracy"]) < 0.02
        assert (found[0]["computed"], found[0]["kept"]) == (computed, kept)
        assert (found[0]["skipped"], found[0]["updates"]) == (skipped, 112)
        assert found[0]["sum"] != plain[0]["sum"]


def test_gradients_that_float16_cannot_hold_need_a_scaled_loss(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    assert pool.run(precision_keras.small_gradients, ("precision=fp16:loss_scale=1:growth_interval=0",))[0] > 0.5
    assert pool.run(precision_keras.small_gradients, ("precision=fp16:loss_scale=268435456",))[0] < 0.1


@pytest.mark.parametrize(
    ("mode", "line"),
    [("eager", ",clip_value=1"), ("function", ",accumulate=2"), ("fit", ",clip_norm=1"), ("fit", ",zero=1")],
)
def test_an_overflow_on_one_rank_is_skipped_by_all(rank_pool: RankPoolFactory, mode: str, line: str) -> None:
    pool = rank_pool(2)
    found = pool.run(precision_keras.one_overflow, (f"precision=fp16:loss_scale=1024{line}", mode, 1))
    assert found[0] == found[1]
    assert found[0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert found[0]["changed"] == [True, False, True, True]
    assert found[0]["finite"]
    assert (found[0]["iterations"], found[0]["counted"]) == (3, 3)


def test_layers_that_are_float32_get_the_policy(rank_pool: RankPoolFactory) -> None:
    found = rank_pool(2).run(precision_keras.policies, ("precision=bf16",))[0]
    assert found.pop("wide") == "float64"
    assert {"dense", "recurrent", "norm"} < found.keys()
    assert set(found.values()) == {"mixed_bfloat16"}


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("precision=bf16", "mixed", "mixed_bfloat16"),
        ("precision=fp16", "unscaled", "scale_loss"),
        ("precision=fp16", "scaling", "scales the loss by itself"),
        ("clip_norm=1", "scaling", "scales the loss by itself"),
        ("precision=bf16", "optimizer", "distribute"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(
    rank_pool: RankPoolFactory, line: str, kind: str, message: str
) -> None:
    for found in rank_pool(2).run(precision_keras.error_of, (line, kind)):
        assert message in found


def test_layers_that_stay_in_32_bits_because_they_were_made_late_are_reported_once(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    assert pool.run(precision_keras.late_layers, (), {"follows": True}) == [["bfloat16"]] * 2
    (dtype, warned), second = pool.run(precision_keras.late_layers, (), {"follows": False})
    assert dtype == "float32"
    assert "late were made after the model was distributed, and compute in float32" in warned
    assert second == ["float32"]
