"""Several backward passes before a step add up as in one process, with every strategy; `no_sync` saves exchanges."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_passes import Case, alone, dropped, joins, on_rank, traffic

pytestmark = pytest.mark.parallel

SHARDED = ("zero=1:shared=false", "zero=1:bucket_mb=0.0003", "zero=2", "zero=3", "zero=3:shared=false")
PASSES = {
    "each": (True, True),
    "the last": (False, True),
    "the second": (True, False, True),
    "none": (False, False),
    "the first": (True, True, False),
}


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def check(case: Case, rank_pool: RankPoolFactory, size: int = 2, tolerance: float = 1e-10) -> None:
    """Compare with one process on whole batches."""
    (expected,) = rank_pool(1).run(alone, (case,))
    for found in rank_pool(size).run(on_rank, (case,)):
        for name, value in expected.items():
            error = (found[name] - value).abs().max().item()
            assert error < tolerance, (case, name, error)


@pytest.mark.parametrize("synced", PASSES)
@pytest.mark.parametrize("strategy", ["data", "data:overlap=false", *SHARDED])
def test_passes_add_up(rank_pool: RankPoolFactory, strategy: str, synced: str) -> None:
    check(Case(strategy, PASSES[synced], by_model=synced != "none"), rank_pool)


@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2", "zero=3:shared=false"])
def test_passes_are_clipped_together(rank_pool: RankPoolFactory, strategy: str) -> None:
    for synced in PASSES.values():
        check(Case(f"{strategy},clip_norm=0.1", synced, max_norm=0.1), rank_pool)


@pytest.mark.parametrize("strategy", ["zero=2", "zero=3:shared=false"])
def test_passes_add_up_in_a_window_of_accumulate(rank_pool: RankPoolFactory, strategy: str) -> None:
    check(Case(f"accumulate=2,{strategy}", window=2), rank_pool)


NARROW = (
    "data,precision=bf16",
    "data,precision=fp16:loss_scale=256,clip_norm=0.1",
    "zero=1,precision=bf16",
    "zero=2,precision=fp16:loss_scale=256",
    "zero=3:shared=false,precision=bf16,clip_norm=0.1",
)


@pytest.mark.parametrize("line", NARROW)
def test_passes_add_up_in_16_bits(rank_pool: RankPoolFactory, line: str) -> None:
    """One pass left out, or gradients that are scaled twice, differ by 0.05 and more."""
    for synced in PASSES.values():
        max_norm = 0.1 if "clip" in line else None
        check(Case(line, synced, max_norm=max_norm, precise=False), rank_pool, tolerance=0.02)


@pytest.mark.parametrize("line", ["tensor=2", "zero=1,tensor=2,clip_norm=0.1", "zero=2,tensor=2"])
def test_passes_add_up_beside_tensor_parallelism(rank_pool: RankPoolFactory, line: str) -> None:
    for synced in PASSES.values():
        check(Case(line, synced, max_norm=0.1 if "clip" in line else None), rank_pool, size=4)


def test_without_a_pass_the_numbers_differ(rank_pool: RankPoolFactory) -> None:
    (two,) = rank_pool(1).run(alone, (Case("", (True, True), precise=False),))
    (three,) = rank_pool(1).run(alone, (Case("", (True, True, True), precise=False),))
    assert (two["outputs"] - three["outputs"]).abs().max() > 0.05


@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2", "zero=3:shared=false"])
def test_no_sync_saves_the_exchange(rank_pool: RankPoolFactory, strategy: str) -> None:
    def exchanged(syncs: tuple[bool, ...]) -> int:
        operations, _ = rank_pool(2).run(traffic, (strategy, syncs))[0]
        return operations["allreduce" if strategy == "data" else "reducescatter"]

    once = exchanged((True,))
    assert exchanged((True, True)) > 1.5 * once
    assert exchanged((False, False, True)) == once


def test_gradients_inside_of_no_sync_are_those_of_the_rank(rank_pool: RankPoolFactory) -> None:
    (_, first), (_, second) = rank_pool(2).run(traffic, ("data", (False, True)))
    assert first == [[1.0] * 3, [3.0] * 3]
    assert second == [[2.0] * 3, [3.0] * 3]


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2"])
def test_gradients_that_the_script_drops_do_not_count(rank_pool: RankPoolFactory, strategy: str, syncs: bool) -> None:
    assert rank_pool(2).run(dropped, (strategy, True, syncs)) == ["", ""]
    by_model = rank_pool(2).run(dropped, (strategy, False, syncs))
    if strategy == "data" or not syncs:
        assert by_model == ["", ""]
    else:
        assert all("optimizer.zero_grad()" in message for message in by_model)


@pytest.mark.parametrize("strategy", ["zero=1", "zero=2:shared=false"])
def test_a_rank_that_joined_takes_part_in_every_pass(rank_pool: RankPoolFactory, strategy: str) -> None:
    assert rank_pool(2).run(joins, (strategy,)) == [[-6.0] * 3] * 2


@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2", "zero=3", "zero=3:shared=false"])
def test_gradients_are_added_up_over_the_ranks(rank_pool: RankPoolFactory, strategy: str) -> None:
    for synced in ((True,), (True, True), (True, False, True)):
        check(Case(f"{strategy},clip_norm=0.1", synced, max_norm=0.1, sums=True), rank_pool)
