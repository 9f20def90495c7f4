"""ZeRO gives the numbers of one process: every stage, with whatever optimizer, over every engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mpi_pool import MpiPool, variables
from part_pools import PartPools

from unidist.plugins import PluginManager
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_zero import Case, beside_fully_shard, errors_of, footprint

pytestmark = pytest.mark.parallel

# Pairs of everything that may matter to each other, not all combinations: each call starts its pool once.
CASES = {
    1: [
        Case("zero=1", "sgd", passes=2),
        Case("zero=2", "adamw"),
        Case("zero=2", "adafactor"),
        Case("zero=3", "adamw", deep=True, contiguous=True),
    ],
    2: [
        Case("zero=1", "adamw"),
        Case("zero=2:shared=false", "sgd", passes=3),
        Case("zero=1:bucket_mb=0.0002", "adafactor", passes=2),
        Case("zero=2:bucket_mb=0.0002", "adamw", unfreezes=True),
        Case("zero=1", "sgd", calls_closure=True),
        Case("zero=2", "adagrad"),
        Case("zero=1:whole=true", "nadam", unfreezes=True),
        Case("zero=2", "adamw", engine="gloo"),
        Case("zero=3:shared=false", "sgd", deep=True),
        Case("zero=3:shared=false", "adafactor", passes=2, deep=True),
        Case("zero=3:shared=true", "adamw", deep=True, unfreezes=True),
        Case("zero=2:shared=false:offload=host", "adamw", unfreezes=True, steps=4),
        Case("zero=1:offload=host:whole=true", "adafactor", passes=2, steps=4),
        Case("zero=3:shared=false:offload=host", "adamw", deep=True, unfreezes=True, steps=4),
        Case("zero=3:units=blocks.*+head.1:prefetch=0", "adamw", deep=True, steps=4),
        Case("zero=3:units=blocks.*.wide:prefetch=3", "adamw", passes=2, deep=True, steps=4),
        Case("zero=3", "adafactor", passes=2, deep=True),
        Case("zero=3", "adamw", deep=True, unfreezes=True, engine="gloo"),
        Case("zero=1", "adafactor", engine="horovod", steps=3),
        Case("zero=2", "adamw", passes=2, engine="horovod", steps=3),
        Case("zero=3", "sgd", deep=True, engine="horovod", steps=3),
    ],
    3: [
        Case("zero=2:bucket_mb=0.0002", "sgd"),
        Case("zero=1:shared=false", "adafactor", unfreezes=True),
        Case("zero=1", "adamw", max_norm=0.3),
        Case("zero=2", "adafactor", max_norm=0.3, passes=2),
        Case("zero=1:bucket_mb=0.0002", "adamw", passes=2, engine="gloo"),
        Case("zero=3:shared=false", "adamw", max_norm=0.3, passes=2, deep=True),
    ],
    4: [
        Case("zero=2", "adamw", max_norm=0.3),
        Case("zero=1:shard=2", "adamw", passes=2),
        Case("zero=2:shard=2:bucket_mb=0.0002", "sgd", passes=2, max_norm=0.3),
        Case("zero=2:shard=1", "adafactor"),
        Case("zero=2:whole=true", "adagrad"),
        Case("zero=2:shard=2", "adafactor", engine="gloo"),
        Case("zero=3:shard=2:shared=false", "adamw", deep=True, unfreezes=True),
        Case("zero=3:shard=2", "sgd", deep=True, unfreezes=True),
        Case("zero=3:shard=2:shared=true", "adamw", deep=True, unfreezes=True, hosts=2, steps=4),
        Case("zero=2:shard=2:shared=true", "sgd", hosts=2, steps=4),
        Case("zero=3", "sgd", deep=True, hosts=2, steps=4),
        Case("zero=3:whole=true:shared=false", "nadam", deep=True, calls_closure=True),
    ],
}
NARROW = 1e-5


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def line(case: Case) -> Case:
    """Return the case with everything in its strategy line."""
    from dataclasses import replace

    extra = [f"accumulate={case.passes}"] if case.passes > 1 else []
    extra += [f"clip_norm={case.max_norm}"] if case.max_norm is not None else []
    return replace(case, strategy=",".join([case.strategy, *extra]))


def usable(engine: str) -> bool:
    """Say whether this machine has an engine."""
    return PluginManager().load().engines.get(engine).load().availability().usable


def check(case: Case, errors: dict[str, float]) -> None:
    alone = errors.pop("alone", None)
    assert alone is None or alone > 1e-6, "without the exchange it would be the same"
    for name, error in errors.items():
        limit = NARROW if name == "narrow" else 1e-12
        assert error <= limit, f"{case}: {name} differs by {error:.2e} from one process"


@pytest.mark.parametrize("size", CASES)
def test_training_in_pytorch_gives_the_numbers_of_one_process(rank_pool: RankPoolFactory, size: int) -> None:
    cases = [line(case) for case in CASES[size] if usable(case.engine)]
    for errors in rank_pool(size).run(errors_of, (cases,)):
        for case, found in zip(cases, errors, strict=True):
            check(case, found)


@pytest.mark.soak  # test_pipeline_parity.py and test_training_parity.py train over MPI, too
def test_training_over_mpi(tmp_path: Path) -> None:
    if not usable("mpi"):
        pytest.skip("MPI is not installed")
    cases = [
        Case("zero=2:bucket_mb=0.0002", "adamw", passes=2, engine="mpi", steps=4),
        Case("zero=3", "adafactor", deep=True, engine="mpi", steps=4),
    ]
    cases = [line(case) for case in cases]
    pool = MpiPool(2, tmp_path, variables({"UNIDIST_ENGINE": "mpi"}))
    try:
        for errors in pool.run(errors_of, (cases,)):
            for case, found in zip(cases, errors, strict=True):
                check(case, found)
    finally:
        pool.close()


def test_each_stage_holds_and_sends_what_the_formulas_say(rank_pool: RankPoolFactory) -> None:
    for stage in (1, 2, 3):
        for held in rank_pool(4).run(footprint, (stage,)):
            n = held.total
            assert held.optimizer == pytest.approx(2 * n / 4, rel=0.1), "two moments of a quarter"
            assert held.gradients == pytest.approx(n if stage == 1 else n / 4, rel=0.1)
            assert held.parameters == pytest.approx(n if stage < 3 else n / 4, rel=0.1)
            assert held.gathered == 0, "between two updates nothing is gathered"
            assert held.scattered == pytest.approx(n, rel=0.02), "of which a quarter stays: (p-1)/p n are sent"
            assert held.sent_parameters == pytest.approx(n / 4 * (1 if stage < 3 else 2), rel=0.02)
            assert held.other < 64, "a byte for each parameter"
            if stage == 3:
                assert held.most_gathered <= 0.3 * n, "a unit, and the next one"


def test_stage_3_and_fully_shard_of_pytorch_agree(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    assert max(rank_pool(2).run(beside_fully_shard, (str(tmp_path),))) < 1e-6
