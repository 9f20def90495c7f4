"""A checkpoint that ZeRO has saved goes on at any number of ranks, at any stage, as if nothing had been."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_zero import Case, errors_of

pytestmark = pytest.mark.parallel

# Each job goes on with what the one before it has saved.
JOBS = [
    (4, "zero=1:bucket_mb=0.0002", "zero=2", "zero=3:shared=false"),
    (2, "zero=2:shared=false", "zero=1:whole=true", "zero=3:whole=true:shared=false"),
    (3, "zero=1", "zero=1", "zero=1"),
    (1, "", "zero=2", "zero=3"),
    (2, "zero=1:whole=true", "", "zero=3"),
    (4, "zero=2:shard=2", "zero=2", "zero=3:shard=2"),
]
OPTIMIZERS = ("adamw", "adafactor", "nadam")  # the last in a network of blocks


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def test_training_goes_on_at_another_number_of_ranks(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    for number, (size, *strategies) in enumerate(JOBS):
        cases = [
            Case(
                strategy,
                optimizer,
                first=3 * number,
                steps=3,
                loads=str(tmp_path / f"{optimizer}-{number - 1}") if number else "",
                saves=str(tmp_path / f"{optimizer}-{number}"),
                contiguous=True,
                deep=optimizer == OPTIMIZERS[-1],
            )
            for strategy, optimizer in zip(strategies, OPTIMIZERS, strict=True)
        ]
        for errors in rank_pool(size).run(errors_of, (cases,)):
            for case, found in zip(cases, errors, strict=True):
                found.pop("alone", None)
                for name, error in found.items():
                    limit = 1e-5 if name == "narrow" else 1e-12
                    assert error <= limit, f"{case}: {name} differs by {error:.2e} from uninterrupted training"
