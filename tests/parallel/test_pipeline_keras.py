"""A pipeline in Keras gives the numbers of one process: models, schedules, `TrainStep` and `fit`, other strategies."""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from mpi_pool import MpiPool, variables
from part_pools import PartPools
from tensorflow_ranks import ENVIRONMENT

from unidist.runtime.plugin_manager import PluginManager
from unidist_pipeline.schedules.registration import ScheduleSpec

pytest.importorskip("tensorflow", reason="the training is in Keras")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _keras_pipeline import Case, compiled_before, misread_targets, partial_losses, run_cases, surprised

pytestmark = pytest.mark.parallel

# Pairs of what may matter to each other: schedules, micro-batches, what passes between stages, ways to train.
CASES = {
    1: [Case("pipeline=1:microbatches=4", "within", "adamw")],
    2: [
        Case("pipeline=2:schedule=gpipe:microbatches=4", "within", "adamw", "fit", steps=2),
        Case("pipeline=2:schedule=zbv:microbatches=5", "tied", "adamw"),
        Case("pipeline=2:schedule=interleaved:microbatches=1", "subclassed"),
    ],
    3: [
        Case("pipeline=3:microbatches=4", "skips"),
        Case("pipeline=3:schedule=dualpipev:microbatches=7", "skips", "adamw"),
        Case("pipeline=3:schedule=zb-h1:microbatches=5:split=block_1+norm", "subclassed", "adamw"),
        Case("pipeline=3:schedule=zb-2p:microbatches=5:split=block_1+norm", "subclassed", "adamw"),
    ],
    4: [
        Case("pipeline=2:microbatches=4,zero=1,accumulate=2", "within", "adamw", passes=2, steps=2),
        Case("pipeline=2:microbatches=5,clip_norm=0.1", "tied", options={"global_clipnorm": 0.1}),
        Case("pipeline=2:microbatches=4,tensor=2", "within", "adamw"),
    ],
}
MORE = {
    2: [
        *(Case("pipeline=2:microbatches=4", model, "adamw", "fit") for model in ("skips", "tied", "subclassed")),
        Case("pipeline=2:microbatches=4,zero=2", "skips", "adamw"),
    ],
    3: [Case("pipeline=3:microbatches=5", model, "sgd", "fit") for model in ("skips", "within", "tied", "subclassed")],
    4: [
        Case("pipeline=2:microbatches=2,zero=2", "within", "adamw", passes=1),
        Case("pipeline=2:microbatches=4,zero=1,clip_norm=0.1", "tied", options={"global_clipnorm": 0.1}),
        Case("pipeline=4:schedule=interleaved:microbatches=4", "skips"),
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


def check_all(pools: PartPools, size: int, cases: list[Case], engine: str = "shm") -> None:
    for found in pools.get(size).run(run_cases, (cases, engine), timeout=LONG):
        for case, errors in zip(cases, found, strict=True):
            check(case, errors)


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        *(
            pytest.param(size, cases, id=f"{size} ranks", marks=[pytest.mark.soak] if size > 2 else [])
            for size, cases in CASES.items()
        ),
        *(pytest.param(size, cases, id=f"{size} ranks, more", marks=pytest.mark.soak) for size, cases in MORE.items()),
    ],
)
def test_training_in_keras_gives_the_numbers_of_one_process(
    tensorflow_pools: PartPools, size: int, cases: list[Case]
) -> None:
    check_all(tensorflow_pools, size, cases)


@pytest.mark.parametrize("engine", ["gloo", pytest.param("horovod", marks=pytest.mark.soak)])
def test_on_other_engines(tensorflow_pools: PartPools, engine: str) -> None:
    if engine == "gloo":
        pytest.importorskip("torch", reason="gloo is PyTorch's")
    else:
        pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed for TensorFlow")
    check_all(tensorflow_pools, 2, [Case("pipeline=2:schedule=zb-h1:microbatches=4", "within")], engine)


@pytest.mark.soak
def test_over_mpi(tmp_path: Path) -> None:
    if not PluginManager().load().engines.get("mpi").load().availability().usable:
        pytest.skip("MPI is not installed")
    cases = [
        Case("pipeline=2:microbatches=4", "skips", "adamw"),
        Case("pipeline=2:schedule=zbv:microbatches=5", "tied", mode="fit", steps=2),
    ]
    pool = MpiPool(2, tmp_path, variables({**ENVIRONMENT, "UNIDIST_ENGINE": "mpi"}))
    try:
        for found in pool.run(run_cases, (cases, "mpi"), timeout=LONG):
            for case, errors in zip(cases, found, strict=True):
                check(case, errors)
    finally:
        pool.close()


@pytest.mark.soak
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_schedule(tensorflow_pools: PartPools, stages: int) -> None:
    schedules = [spec.name for spec in PluginManager().load().registry(ScheduleSpec)]
    for schedule, count in itertools.product(schedules, (1, 4, 5)):
        check_all(
            tensorflow_pools,
            stages,
            [Case(f"pipeline={stages}:schedule={schedule}:microbatches={count}", "skips", steps=2)],
        )


def test_the_check_fails_without_the_sum_over_stages(tensorflow_pools: PartPools) -> None:
    case = Case("pipeline=2:microbatches=2", "tied", steps=2, unties=True)
    for (errors,) in tensorflow_pools.get(2).run(run_cases, ([case], "shm"), timeout=LONG):
        with pytest.raises(AssertionError, match="differs"):
            check(case, errors)


@pytest.mark.soak
def test_training_goes_on_in_another_number_of_stages(tensorflow_pools: PartPools, tmp_path: Path) -> None:
    jobs = [(2, "pipeline=2:schedule=interleaved:microbatches=2"), (1, ""), (3, "pipeline=3:microbatches=2,zero=1")]
    for number, (size, strategy) in enumerate(jobs):
        loads = str(tmp_path / str(number - 1)) if number else ""
        case = Case(
            strategy, "tied", "adamw", steps=number + 1, first=number, loads=loads, saves=f"{tmp_path}/{number}"
        )
        check_all(tensorflow_pools, size, [case])


def test_a_compiled_model_stays_so_and_a_rank_keeps_its_stages_only(tensorflow_pools: PartPools) -> None:
    outcomes = tensorflow_pools.get(2).run(compiled_before, (), timeout=LONG)
    assert outcomes[0][0] == outcomes[1][0]
    for history, is_given_back, refusals in outcomes:
        assert set(history) == {"loss", "mae"}
        assert history["loss"][1] != history["loss"][0]
        assert is_given_back, "memory of other stages' weights"
        for text, says in zip(
            refusals, ("stage of another rank", "model.save sees", "cannot be called in train"), strict=True
        ):
            assert says in text


def test_outputs_without_a_loss_need_no_targets(tensorflow_pools: PartPools) -> None:
    for errors in tensorflow_pools.get(2).run(partial_losses, (), timeout=LONG):
        assert len(errors) == 5
        assert not {name: error for name, error in errors.items() if error > 1e-10}


def test_targets_of_the_wrong_outputs_would_be_noticed(tensorflow_pools: PartPools) -> None:
    assert tensorflow_pools.get(2).run(misread_targets, ("off",), timeout=LONG) == [("", ""), ("", "")], "silent"
    for kind, text in tensorflow_pools.get(2).run(misread_targets, ("first",), timeout=LONG):
        assert kind == "MismatchError"
        assert "the loss is" in text


@pytest.mark.parametrize("engine", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_an_exception_in_a_stage_ends_every_rank(tensorflow_pools: PartPools, engine: str) -> None:
    first, second = tensorflow_pools.get(2).run(surprised, ("raises", engine), timeout=LONG)
    assert "no such word" in second[1]
    assert first[0] == "PeerLostError"
    assert "rank 1" in first[1]
    assert engine != "shm" or "no such word" in first[1]


@pytest.mark.soak
def test_a_killed_rank_ends_every_rank(tensorflow_pools: PartPools) -> None:
    with pytest.raises(Exception, match="rank 1"):
        tensorflow_pools.get(2).run(surprised, ("dies", "shm"), timeout=LONG)


def test_ranks_with_different_data_are_told_and_go_on(tensorflow_pools: PartPools) -> None:
    for kind, text, again in tensorflow_pools.get(2).run(surprised, ("differs", "shm"), timeout=LONG):
        assert kind == "DifferentInputsError"
        assert "rank 1" in text
        assert again == "trained"
