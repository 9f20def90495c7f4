"""Precision in PyTorch: what is computed in 16 bits, that nothing vanishes, and that all ranks skip together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import precision_torch
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def test_digits_are_learnt_as_well_in_16_bits_as_in_32(rank_pool: RankPoolFactory) -> None:
    pytest.importorskip("sklearn")
    pool = rank_pool(2)
    plain = pool.run(precision_torch.digits, ("precision=fp32",))
    assert plain[0]["accuracy"] > 0.85
    assert plain[0]["computed"] == "torch.float32"
    for line, dtype, skipped in (("bf16", "torch.bfloat16", None), ("fp16,clip_norm=5", "torch.float16", 0)):
        found = pool.run(precision_torch.digits, (f"precision={line}",))
        assert found[0] == found[1]
        assert abs(found[0]["accuracy"] - plain[0]["accuracy"]) < 0.02
        assert (found[0]["computed"], found[0]["returned"], found[0]["kept"]) == (
            dtype,
            "torch.float32",
            "torch.float32",
        )
        assert found[0]["skipped"] == skipped
        assert found[0]["sum"] != plain[0]["sum"]


def test_with_zero_parameters_are_of_16_bits_and_updated_in_32(rank_pool: RankPoolFactory) -> None:
    pytest.importorskip("sklearn")
    pool = rank_pool(2)
    plain = pool.run(precision_torch.digits, ("precision=fp32",))
    for line, dtype in (
        ("zero=2,precision=bf16:reduce=fp32", "torch.bfloat16"),
        ("precision=fp16,zero=1,clip_norm=5", "torch.float16"),
    ):
        found = pool.run(precision_torch.digits, (line,))
        assert found[0] == found[1]
        assert abs(found[0]["accuracy"] - plain[0]["accuracy"]) < 0.02
        assert (found[0]["computed"], found[0]["kept"]) == (dtype, dtype)
        assert found[0]["skipped"] in (None, 0)


def test_gradients_that_float16_cannot_hold_need_a_scaled_loss(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    assert pool.run(precision_torch.small_gradients, ("precision=fp16:loss_scale=1:growth_interval=0",))[0] > 0.5
    assert pool.run(precision_torch.small_gradients, ("precision=fp16:loss_scale=268435456",))[0] < 0.1
    assert pool.run(precision_torch.small_gradients, ("precision=bf16",))[0] < 0.1
    assert pool.run(precision_torch.small_gradients, ("precision=fp16:loss_scale=268435456,zero=2",))[0] < 0.1


@pytest.mark.parametrize("line", ["", ",clip_norm=1", ",accumulate=2,clip_value=1", ",data:overlap=false", ",zero=1"])
def test_an_overflow_on_one_rank_is_skipped_by_all(rank_pool: RankPoolFactory, line: str) -> None:
    found = rank_pool(2).run(precision_torch.one_overflow, (f"precision=fp16:loss_scale=1024{line}", 1))
    assert found[0] == found[1]
    assert found[0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert found[0]["changed"] == [True, False, True, True]
    assert found[0]["finite"]
    assert (found[0]["steps"], found[0]["counted"]) == (3, 3)


def test_gradients_flow_through_structures_and_twice_through_the_model_unharmed(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    expected = pool.run(precision_torch.structured, ("precision=fp32",))[0]
    found = pool.run(precision_torch.structured, ("precision=fp16:loss_scale=1024",))
    for name, value in expected.items():
        for rank in range(2):
            np.testing.assert_allclose(found[rank][name], value, rtol=0.02, atol=0.02, err_msg=name)


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("precision=bf16", "float64", "torch.float64"),
        ("precision=bf16", "compiled", "torch.compile"),
        ("precision=fp16", "returns", "found no tensor"),
        ("precision=fp16", "penalty", "no loss was multiplied"),
        ("precision=fp16", "closure", "closure"),
        ("precision=bf16", "optimizer", "distribute"),
        ("clip_norm=1", "scaler", "GradScaler"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(
    rank_pool: RankPoolFactory, line: str, kind: str, message: str
) -> None:
    for found in rank_pool(2).run(precision_torch.error_of, (line, kind)):
        assert message in found


def test_copies_of_a_model_are_plain_models(rank_pool: RankPoolFactory) -> None:
    assert rank_pool(2).run(precision_torch.copies, ("precision=bf16",))[0] == [
        *("False", "True", "True"),
        *("Linear", "Linear", "True"),
    ]


@pytest.mark.parametrize("line", ["precision=bf16", "zero=2,precision=bf16", "activations=recompute,precision=bf16"])
def test_modules_called_from_outside_of_forward_compute_in_16_bits(rank_pool: RankPoolFactory, line: str) -> None:
    pool = rank_pool(2)
    whole = pool.run(precision_torch.called, (line, "whole"))
    assert whole[0]["computed"] == ["torch.bfloat16"]
    parts = pool.run(precision_torch.called, (line, "parts"))
    for rank in range(2):
        assert (parts[rank]["computed"], parts[rank]["returned"]) == (["torch.bfloat16"], "torch.float32")
        assert parts[rank]["kinds"] == ["Linear", "ModuleList", "Parts", "Sequential", "Tanh"]
        assert not parts[rank]["warned"]
        for expected, weights in zip(whole[rank]["weights"], parts[rank]["weights"], strict=True):
            np.testing.assert_array_equal(weights, expected)


def test_compiled_modules_and_pickles_of_modules(rank_pool: RankPoolFactory) -> None:
    found = rank_pool(2).run(precision_torch.called, ("precision=bf16", "compiled"))[0]
    assert (found["computed"], found["returned"], found["loads"]) == (["torch.bfloat16"], "torch.float32", True)


def test_a_model_of_which_nothing_is_called_is_reported_once(rank_pool: RankPoolFactory) -> None:
    first, second = rank_pool(2).run(precision_torch.called, ("precision=bf16", "parameters"))
    (warned,) = first["warned"]
    assert warned.startswith("strategy precision=bf16: neither Parts nor a module in it was called")
    assert not second["warned"]


def test_a_scaled_loss_needs_the_model_to_be_called(rank_pool: RankPoolFactory) -> None:
    for found in rank_pool(2).run(precision_torch.called, ("precision=fp16", "parts")):
        assert "called Sequential, a module in it, from outside of its forward" in found["error"]


@pytest.mark.parametrize(
    "line",
    ["", ",zero=1", ",zero=2", ",zero=3", ",zero=3:shared=false", ",zero=2:whole=true", ",zero=1:bucket_mb=0.0004"],
)
def test_state_in_bf16_is_the_same_on_any_number_of_ranks(rank_pools: PartPools, line: str) -> None:
    alone = rank_pools.get(1).run(precision_torch.kept_in_bf16, ("precision=bf16:states=bf16",))[0]
    assert set(alone["types"].values()) == {"torch.bfloat16"}
    assert len(alone["types"]) == 7
    for found in rank_pools.get(2).run(precision_torch.kept_in_bf16, (f"precision=bf16:states=bf16{line}",)):
        assert found == alone
    nearest = rank_pools.get(1).run(precision_torch.kept_in_bf16, ("precision=bf16:states=bf16:rounding=nearest",))[0]
    assert nearest["bits"] != alone["bits"]


@pytest.mark.parametrize("line", ["", ",zero=1"])
def test_small_updates_are_not_lost_where_state_in_bf16_is_rounded_stochastically(
    rank_pools: PartPools, line: str
) -> None:
    pool = rank_pools.get(2)
    assert pool.run(precision_torch.small_updates, (f"precision=bf16:states=bf16:rounding=nearest{line}",)) == [
        0.0,
        0.0,
    ]
    one, other = pool.run(precision_torch.small_updates, (f"precision=bf16:states=bf16{line}",))
    assert one == other
    assert abs(one - 64 / 1024) < 0.003


@pytest.mark.parametrize(
    ("line", "optimizer", "has_experts"),
    [
        ("tensor=2", "AdamW", False),
        ("tensor=2", "Muon", False),
        ("data", "Muon", False),
        ("zero=1", "Muon", False),
        ("expert=2", "AdamW", True),
    ],
)
def test_state_in_bf16_composes(rank_pools: PartPools, line: str, optimizer: str, *, has_experts: bool) -> None:
    """Divided tensors are rounded by other numbers, and sums of gradients too, so losses are about the same."""
    options = {"has_experts": has_experts}
    ((wanted, _),) = rank_pools.get(1).run(precision_torch.words, ("precision=bf16:states=bf16", optimizer), options)
    assert wanted[-1] < 0.95 * wanted[0]
    given = (f"{line},precision=bf16:states=bf16", optimizer)
    for losses, types in rank_pools.get(2).run(precision_torch.words, given, options):
        assert losses == pytest.approx(wanted, rel=0.02)
        assert types == {"torch.bfloat16"}


def test_state_in_bf16_in_files_has_the_same_bits(rank_pools: PartPools, tmp_path: Path) -> None:
    line = "precision=bf16:states=bf16"
    plain = rank_pools.get(2).run(precision_torch.words, (f"zero=1,{line}",))
    assert rank_pools.get(2).run(precision_torch.words, (f"zero=1:offload={tmp_path},{line}",)) == plain
