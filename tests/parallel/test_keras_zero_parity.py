"""ZeRO in Keras gives the numbers of one process: every stage, however a step is run, with whatever optimizer."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from engine_pools import EnginePool
from mpi_pool import MpiPool, variables
from part_pools import PartPools

from unidist.plugins import PluginManager
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("tensorflow", reason="the training is in Keras")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _keras_zero import Case, go_on, record_step, run_cases

pytestmark = pytest.mark.parallel

# Pairs of everything that may matter to each other, not all combinations. Tracing a step is what costs: "function" and
# "fit" are where they have a part in it; `MORE`, which is soak, has them beside other optimizers and stages.
CASES = {
    1: [
        Case("zero=1,accumulate=2", "adamw", "function", passes=2),
        Case("zero=2:whole=true", "sgd", "eager", {"clipnorm": 0.02}),
        Case("zero=3", "adamw", "fit", layered=True, noisy=True),
        Case("zero=3", "sgd", "eager", layered=True, noisy=True),
    ],
    2: [
        Case("zero=1:bucket_mb=0.0002", "adamw", "eager", {"use_ema": True, "ema_momentum": 0.9}),
        Case("zero=2", "adamw", "function", {"global_clipnorm": 0.05}, excluded=("bias", "inner")),
        Case("zero=2:bucket_mb=0.0002", "schedule_free", "eager", layered=True),
        Case("zero=1,accumulate=2", "sgd", "fit", passes=2, constrained=True),
        Case("zero=3", "adamw", "eager", layered=True, deferred=True),
        Case("zero=3,accumulate=2", "sgd", "function", passes=2),
        # Not ZeRO's, but the same model: an average of what has no gradient.
        Case("data", "adamw", "eager", {"use_ema": True, "ema_overwrite_frequency": 2}),
    ],
    3: [
        Case("zero=2:bucket_mb=0.0002", "muon", "fit", {"global_clipnorm": 0.05}),
        Case("zero=2:bucket_mb=0.0002", "adamw", "function", {"clipnorm": 0.02}, scaled=True),
        Case("zero=2,accumulate=2", "adamw", "eager", {"ema_overwrite_frequency": 2, "use_ema": True}, passes=2),
        Case("zero=3", "muon", "eager", layered=True),
        Case("zero=3", "adamw", "fit", {"clipnorm": 0.02}, layered=True, excluded=("bias",)),
        Case("zero=3", "lamb", "eager", scaled=True),
    ],
}
MORE = {
    1: [Case("zero=3", "muon", "fit", layered=True)],
    2: [
        Case("zero=2:bucket_mb=0.0002", "sgd", "fit", {"clipvalue": 0.01}, layered=True),
        Case("zero=1", "lamb", "fit"),
        Case("zero=3", "adamw", "fit", {"global_clipnorm": 0.05}, layered=True),
        Case("zero=2", "adamw", "fit", {"use_ema": True, "ema_momentum": 0.9}),
        Case("data", "adamw", "function", {"use_ema": True, "ema_overwrite_frequency": 2}),
    ],
    3: [
        Case("zero=1:bucket_mb=0.0002", "adafactor", "function"),
        Case("zero=1", "nadam", "fit", layered=True),
        Case("zero=3", "sgd", "fit", {"use_ema": True, "ema_momentum": 0.9}),
        Case("zero=3", "muon", "fit", layered=True),
        Case("zero=3", "adamw", "function", {"clipnorm": 0.02}, layered=True, excluded=("bias",)),
    ],
}
LIMIT = 1e-12
LONG = timedelta(seconds=600)


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def check(case: Case, errors: dict[str, float]) -> None:
    for name, error in errors.items():
        assert error <= LIMIT, f"{case}: {name} differs by {error:.2e} from one process"


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        *(pytest.param(size, cases, id=f"{size} ranks") for size, cases in CASES.items()),
        *(pytest.param(size, cases, id=f"{size} ranks, more", marks=pytest.mark.soak) for size, cases in MORE.items()),
    ],
)
def test_training_in_keras_gives_the_numbers_of_one_process(
    rank_pool: RankPoolFactory, size: int, cases: list[Case]
) -> None:
    for found in rank_pool(size).run(run_cases, (cases,), timeout=LONG):
        for case, errors in zip(cases, found, strict=True):
            check(case, errors)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["gloo", "horovod"])
def test_training_in_keras_over_other_engines(rank_pool: RankPoolFactory, engine: str) -> None:
    if not PluginManager().load().engines.get(engine).load().availability().usable:
        pytest.skip(f"{engine} is not installed")
    cases = [
        Case("zero=1:bucket_mb=0.0002", "adamw", "function", layered=True),
        Case("zero=2", "muon", "eager", {"global_clipnorm": 0.05}),
        Case("zero=3", "adamw", "fit", layered=True),
    ]
    for found in EnginePool(rank_pool(2), engine).run(run_cases, (cases,), timeout=LONG):
        for case, errors in zip(cases, found, strict=True):
            check(case, errors)


@pytest.mark.soak
def test_training_in_keras_over_mpi(tmp_path: Path) -> None:
    if not PluginManager().load().engines.get("mpi").load().availability().usable:
        pytest.skip("MPI is not installed")
    cases = [Case("zero=2:bucket_mb=0.0002", "adamw", "function", layered=True), Case("zero=3", "sgd", layered=True)]
    pool = MpiPool(2, tmp_path, variables({"UNIDIST_ENGINE": "mpi"}))
    try:
        for found in pool.run(run_cases, (cases,)):
            for case, errors in zip(cases, found, strict=True):
                check(case, errors)
    finally:
        pool.close()


def test_the_check_fails_without_the_exchange(rank_pool: RankPoolFactory) -> None:
    cases = [Case("", "adamw"), Case("", "adamw", layered=True)]
    for found in rank_pool(2).run(run_cases, (cases,), {"exchanged": False}, timeout=LONG):
        for case, errors in zip(cases, found, strict=True):
            for name, error in errors.items():
                if not name.endswith(("unused", "frozen", "empty")):
                    assert error > 100 * LIMIT, f"{name} differs by {error:.2e} only: nobody would miss the exchange"
            with pytest.raises(AssertionError, match="differs"):
                check(case, errors)


@pytest.mark.parametrize(
    ("strategy", "gathered"),
    [pytest.param("zero=1:bucket_mb=0.0002", 1, marks=pytest.mark.soak), ("zero=2:bucket_mb=0.0002", 1), ("zero=3", 2)],
)
def test_a_step_sends_what_the_formulas_say(rank_pool: RankPoolFactory, strategy: str, gathered: int) -> None:
    case = Case(strategy, "adamw", "function", layered=True)
    for found, own, whole in rank_pool(2).run(record_step, (case,), timeout=LONG):
        assert found["reducescatter"] == 8 * whole  # of which every rank sends the half that is not its own
        assert found["allgather"] == gathered * 8 * own
        assert found.keys() <= {"reducescatter", "allgather", "allreduce"}
        assert found.get("allreduce", 0) < 64  # who has a gradient: a byte for each variable


# Each job goes on with what the one before it has saved. The last one goes on in a step that is traced.
JOBS = [
    (3, "eager", "zero=3", "zero=2"),
    (1, "eager", "zero=1", ""),
    (2, "eager", "", "zero=3"),
    (2, "function", "zero=2:bucket_mb=0.0002", "zero=1:bucket_mb=0.0002"),
]
STEPS = 2


def test_training_goes_on_at_another_number_of_ranks(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    for number, (size, mode, *strategies) in enumerate(JOBS):
        jobs = []
        for strategy, optimizer in zip(strategies, ("adamw", "adafactor"), strict=True):
            options = {"use_ema": True, "ema_momentum": 0.9} if optimizer == "adamw" else {}
            case = Case(strategy, optimizer, mode, options, steps=STEPS * (number + 1), layered=True)
            before = str(tmp_path / f"{optimizer}-{number - 1}") if number else ""
            jobs.append((case, STEPS * number, before, str(tmp_path / f"{optimizer}-{number}")))
        for found in rank_pool(size).run(go_on, (jobs,), timeout=LONG):
            for (case, *_), errors in zip(jobs, found, strict=True):
                check(case, errors)
