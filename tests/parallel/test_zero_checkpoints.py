"""A checkpoint that ZeRO has saved goes on at any number of ranks, at any stage, as if nothing had been."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from part_pools import PartPools

from unidist.jobs.pool.pool import RankPool
from unidist.testing.fixtures import RankPoolFactory

sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _zero_cases import Case, KerasCase, TorchCase, errors_on

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def framework(request: pytest.FixtureRequest) -> str:
    """The framework of a test."""
    name: str = request.param
    pytest.importorskip(name, reason=f"the training is in {name}")
    return name


@pytest.fixture(scope="module")
def rank_pools(framework: str, torch_pools: PartPools, tensorflow_pools: PartPools) -> PartPools:
    """The ranks of a test, which `leak_check` asks too."""
    return torch_pools if framework == "torch" else tensorflow_pools


EMA = (("use_ema", True), ("ema_momentum", 0.9))

# Each job, on so many ranks, goes on with what the one before it has saved, of several trainings.
TORCH_JOBS: list[tuple[int, list[Case]]] = [
    (
        size,
        [
            TorchCase(one, "adamw", steps=3),
            TorchCase(two, "adafactor", steps=3),
            TorchCase(three, "nadam", steps=3, layered=True),
            TorchCase(two, "muon", steps=3),
            TorchCase(one, "composed", steps=3),
        ],
    )
    for size, one, two, three in [
        (4, "zero=1:bucket_mb=0.0002", "zero=2", "zero=3:shared=false"),
        (2, "zero=2:shared=false", "zero=1:whole=true", "zero=3:whole=true:shared=false"),
        (3, "zero=1", "zero=1", "zero=1"),
        (1, "data", "zero=2", "zero=3"),
        (2, "zero=1:whole=true", "data", "zero=3"),
        (4, "zero=2:shard=2", "zero=2", "zero=3:shard=2"),
    ]
]
# The last one goes on in a step that is traced.
KERAS_JOBS: list[tuple[int, list[Case]]] = [
    (
        size,
        [
            KerasCase(one, "adamw", steps=2, layered=True, mode=mode, options=EMA),
            KerasCase(two, "adafactor", steps=2, layered=True, mode=mode),
        ],
    )
    for size, mode, one, two in [
        (3, "eager", "zero=3", "zero=2"),
        (1, "eager", "zero=1", "data"),
        (2, "eager", "data", "zero=3"),
        (2, "function", "zero=2:bucket_mb=0.0002", "zero=1:bucket_mb=0.0002"),
    ]
]


@pytest.mark.parametrize(
    ("framework", "jobs"),
    [("torch", TORCH_JOBS), ("tensorflow", KERAS_JOBS)],
    indirect=["framework"],
    ids=["torch", "keras"],
)
def test_training_goes_on_at_another_number_of_ranks(
    framework: str, jobs: list[tuple[int, list[Case]]], rank_pool: RankPoolFactory, tmp_path: Path
) -> None:
    for number, (size, trainings) in enumerate(jobs):
        cases = [case.part(number, tmp_path) for case in trainings]
        train_and_compare(rank_pool(size), cases)


def train_and_compare(pool: RankPool, cases: list[Case]) -> None:
    """Train, and fail unless every rank comes to the parameters of one process that was never interrupted."""
    for found in errors_on(pool, cases):
        for case, errors in zip(cases, found, strict=True):
            for name, error in errors.items():
                limit = 1e-5 if name == "narrow" else 1e-12
                assert error <= limit, f"{case}: {name} differs by {error:.2e} from uninterrupted training"


@pytest.mark.parametrize(
    ("framework", "kind"),
    [
        pytest.param("torch", TorchCase, id="torch"),
        pytest.param("tensorflow", KerasCase, id="keras", marks=pytest.mark.soak),
    ],
    indirect=["framework"],
)
def test_a_save_before_the_first_update_changes_nothing_and_loads(
    framework: str, kind: type[Case], rank_pool: RankPoolFactory, tmp_path: Path
) -> None:
    plain = [
        kind("zero=1", "adamw", steps=2),
        kind("zero=2:bucket_mb=0.0002", "adafactor", steps=2),
        kind("zero=3", "adamw", steps=2, layered=True),
    ]
    folders = [str(tmp_path / str(number)) for number in range(len(plain))]
    train_and_compare(
        rank_pool(2), [replace(case, saves_early=path) for case, path in zip(plain, folders, strict=True)]
    )
    train_and_compare(rank_pool(3), [replace(case, loads=path) for case, path in zip(plain, folders, strict=True)])
