"""`UnidistTrainer` in Ray Train: numbers, reports, checkpoints, and a worker that is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cluster_training import assert_equal_to_one_process, train, train_and_kill

from unidist_ray import UnidistConfig, UnidistTrainer

ray = pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
    # Ray's own, of each trainer: it asks itself for settings that it has retired.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_workers_are_ranks_train_as_one_process_and_resume_from_a_checkpoint(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig

    first = UnidistTrainer(
        _loop,
        train_loop_config={"folder": str(tmp_path / "work"), "steps": 3},
        unidist_config=UnidistConfig(strategy="zero=2", env={"MY_OWN": "x"}),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="first", storage_path=str(tmp_path / "storage")),
    ).fit()
    assert first.metrics["own"] == "x"
    assert first.metrics["place"] == (0, 2, "shm")
    assert_equal_to_one_process([first.metrics["weights"]] * 2, 3)
    assert first.checkpoint is not None
    with first.checkpoint.as_directory() as saved:
        assert os.path.isdir(os.path.join(saved, "step-00000003"))
        again = UnidistTrainer(
            _loop,
            train_loop_config={"folder": saved, "steps": 2, "resume": True},
            scaling_config=ScalingConfig(num_workers=3),
            run_config=RunConfig(name="again", storage_path=str(tmp_path / "storage")),
        ).fit()
    assert again.metrics["place"] == (0, 3, "shm")
    assert_equal_to_one_process([again.metrics["weights"]] * 3, 5)


def test_a_killed_worker_ends_the_attempt_and_another_goes_on(tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    result = UnidistTrainer(
        _loop_with_a_kill,
        train_loop_config={"folder": str(tmp_path / "run")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert os.path.exists(tmp_path / "run.killed")
    assert_equal_to_one_process([result.metrics["weights"]] * 2, 4)


def test_the_error_of_the_rank_that_failed_comes_out(tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig

    trainer = UnidistTrainer(
        _fail,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "storage")),
    )
    with pytest.raises(Exception, match="division by zero"):
        trainer.fit()


def _loop(config: dict[str, Any]) -> None:
    from unidist.runtime import init

    context = init()
    place = (context.topology.rank, context.topology.world_size, context.engine.spec.name)
    weights = train(config["steps"], folder=config["folder"], resume=config.get("resume", False))
    checkpoint = ray.train.Checkpoint.from_directory(config["folder"]) if place[0] == 0 else None
    ray.train.report({"weights": weights, "place": place, "own": os.environ.get("MY_OWN")}, checkpoint=checkpoint)


def _loop_with_a_kill(config: dict[str, Any]) -> None:
    weights = train_and_kill(4, folder=config["folder"], rank=1, at=2)
    # Ray's result has the metrics of reports with a checkpoint only.
    is_first = ray.train.get_context().get_world_rank() == 0
    checkpoint = ray.train.Checkpoint.from_directory(config["folder"]) if is_first else None
    ray.train.report({"weights": weights}, checkpoint=checkpoint)


def _fail() -> None:
    import torch

    import unidist.torch as ud

    ud.init()
    if ud.rank() == 1:
        1 / 0  # noqa: B018 - it is to fail
    ud.allreduce(torch.zeros(1))
