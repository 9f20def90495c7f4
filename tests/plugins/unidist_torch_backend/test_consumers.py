"""PyTorch's own ways to train in parallel give over `unidist` what they give over gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

import torch
from _consumers import differences, exchange_matters, power_sgd_in_several_buckets

pytestmark = pytest.mark.parallel


def ranks(size: int) -> list[tuple[int, int]]:
    return [(rank, size) for rank in range(size)]


def test_two_ranks_train_bit_for_bit_as_over_gloo(torch_pools: PartPools, tmp_path: Path) -> None:
    for found in torch_pools.get(2).run(differences, (str(tmp_path),), per_rank_args=ranks(2)):
        assert found == dict.fromkeys(found, 0.0)


def test_four_ranks_train_as_over_gloo(torch_pools: PartPools, tmp_path: Path) -> None:
    for found in torch_pools.get(4).run(differences, (str(tmp_path),), per_rank_args=ranks(4)):
        assert found.pop("DDP, fp16 hook") < 1e-4  # added up in 16 bits, in another order
        assert max(found.values()) < 1e-12, found


def test_without_an_exchange_the_weights_are_others(torch_pools: PartPools, tmp_path: Path) -> None:
    assert torch_pools.get(2).run(exchange_matters, (str(tmp_path),), per_rank_args=ranks(2)) == [True, True]


def test_power_sgd_in_several_buckets_ends_with_equal_weights(torch_pools: PartPools, tmp_path: Path) -> None:
    """Its callbacks start operations of their own. Over gloo they meet those of the backward pass, and it hangs."""
    one, other = torch_pools.get(2).run(power_sgd_in_several_buckets, (str(tmp_path),), per_rank_args=ranks(2))
    assert torch.equal(one, other)
