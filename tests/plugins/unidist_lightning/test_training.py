"""Training by `Trainer(strategy="unidist")` gives the numbers of one process, and those of Lightning's own DDP."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lightning")

from lightning_runs import distance, train_by_ddp, train_on_rank

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
STRATEGIES = ["data", "zero=1", "zero=2", "zero=3", "zero=3:shared=false"]
Run = Callable[..., Any]


@pytest.mark.parametrize("line", STRATEGIES)
@pytest.mark.parametrize("options", [CLIPPED, BY_VALUE], ids=["norm", "value"])
def test_ranks_train_what_one_process_trains(line: str, options: dict[str, Any], alone: Run, together: Run) -> None:
    expected = alone(validate=True, **options)
    found = together(line, validate=True, **options)
    assert distance(found["state"], expected["state"]) < 1e-12
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-12)
    assert (found["step"], found["epoch"], found["rates"]) == (expected["step"], expected["epoch"], expected["rates"])
    assert found["class"] == "Regression"
    assert not found["is_initialized"]  # torch.distributed


def test_ranks_that_exchange_nothing_would_be_noticed(alone: Run, rank_pool: RankPoolFactory) -> None:
    """Each rank trains on its samples alone: far from what all of them train."""
    expected = alone()
    apart = rank_pool(2).run(train_apart, per_rank_args=[(0,), (1,)])
    assert all(distance(each, expected["state"]) > 1e-3 for each in apart)


def train_apart(rank: int) -> Any:
    from unittest import mock

    import lightning_runs
    from torch.utils.data import DistributedSampler

    with mock.patch.object(lightning_runs, "DistributedSampler", lambda data, *_: DistributedSampler(data, 2, rank)):
        return lightning_runs.train(6)["state"]  # type: ignore[index]


@pytest.mark.parametrize("line", ["data", "zero=2"])
def test_ranks_train_what_lightnings_ddp_trains(line: str, together: Run, rank_pool: RankPoolFactory) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ddp = rank_pool(2).run(_by_ddp, (port, CLIPPED), per_rank_args=[(0,), (1,)])[0]
    assert isinstance(ddp, dict), ddp
    assert ddp["world_size"] == 2
    assert ddp["is_initialized"]
    found = together(line, **CLIPPED)
    assert distance(found["state"], ddp["state"]) < 1e-12
    assert found["metrics"] == pytest.approx(ddp["metrics"], abs=1e-12)


def _by_ddp(port: int, options: dict[str, Any], rank: int) -> Any:
    return train_by_ddp(6, rank, 2, port, **options)


def test_the_strategy_line_may_be_given_to_the_strategy(alone: Run, together: Run) -> None:
    expected = alone(**CLIPPED)
    found = together(accumulate_grad_batches=2)
    assert distance(found["state"], expected["state"]) > 1e-6  # not clipped
    clipped = together(ours="zero=2,clip_norm=0.3", accumulate_grad_batches=2)
    assert distance(clipped["state"], expected["state"]) < 1e-12


def test_ranks_that_divide_the_model_take_the_same_samples(alone: Run, rank_pool: RankPoolFactory) -> None:
    expected = alone(gradient_clip_val=0.3)
    for found in rank_pool(2).run(train_on_rank, (12, "tensor=2"), {"gradient_clip_val": 0.3}):
        assert isinstance(found, dict), found
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-12)
        assert tuple(found["state"]["net.0.weight"].shape) == (8, 8)


def test_accumulation_by_the_line_counts_batches(alone: Run, together: Run) -> None:
    """As the guide says: `max_steps` and schedules count calls of `step`."""
    found = together("accumulate=5", max_epochs=2)
    assert found["step"] == 10
    assert distance(found["state"], alone(max_epochs=2)["state"]) > 1e-3


@pytest.mark.parametrize("line", ["data", "zero=1", "zero=2"])
def test_several_optimizers_are_exchanged_each_for_itself(line: str, alone: Run, together: Run) -> None:
    expected, found = alone(kind="two"), together(line, kind="two")
    assert distance(found["state"], expected["state"]) < 1e-12


def test_batch_normalisation_sees_the_samples_of_all_ranks(alone: Run, together: Run, answers: Run) -> None:
    module = {"norm": True}
    expected = alone(module=module)
    found = together("data", module=module, sync_batchnorm=True)
    # Less exact: the gradient of a bias before a normalisation is nothing but what was rounded.
    assert distance(found["state"], expected["state"]) < 1e-9
    assert found["layers"] == expected["layers"]  # the script's own again
    plain = answers("data", module=module)[0]
    assert distance(plain["state"], expected["state"]) > 1e-6


@pytest.mark.parametrize("line", ["data", "zero=3:shared=false"])
def test_metrics_count_the_samples_of_all_ranks(line: str, alone: Run, together: Run) -> None:
    expected, found = alone(kind="classes"), together(line, kind="classes")
    assert set(found["metrics"]) == {"accuracy", "MulticlassAUROC"}
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)


def test_early_stopping_stops_all_ranks_in_the_same_epoch(alone: Run, together: Run) -> None:
    options = {"patience": 1, "validate": True, "max_epochs": 30, "module": {"lr": 0.05}}
    expected, found = alone(**options), together("zero=1", **options)
    assert 1 < found["epoch"] == expected["epoch"] < 30


@pytest.mark.parametrize(
    ("line", "precision"),
    [
        ("precision=bf16", None),
        ("zero=2,precision=fp16", None),
        ("zero=3:shared=false,precision=bf16", None),
        ("zero=1", "bf16-mixed"),
    ],
)
def test_sixteen_bits_train_nearly_the_same(line: str, precision: Any, alone: Run, together: Run) -> None:
    expected = alone(dtype="float32")
    found = together(line, dtype="float32", precision=precision)
    assert 1e-5 < distance(found["state"], expected["state"]) < 0.08
    rough = alone(dtype="float32", precision="bf16-mixed")
    assert 1e-5 < distance(rough["state"], expected["state"]) < 0.08


def test_double_precision(alone: Run, together: Run) -> None:
    options = {"dtype": "float32", "precision": "64-true"}
    assert distance(together("zero=2", **options)["state"], alone(**options)["state"]) < 1e-6


@pytest.mark.parametrize("line", ["data", "zero=2"])
def test_fit_may_be_called_again(line: str, alone: Run, together: Run) -> None:
    expected, found = alone(fits=2), together(line, fits=2)
    assert found["epoch"] == 3
    assert distance(found["state"], expected["state"]) < 1e-12


def test_each_rank_predicts_its_samples(alone: Run, answers: Run) -> None:
    found, expected = answers("zero=3:shared=false"), alone()["predicted"]
    parts = [each["predicted"] for each in found]
    assert [len(part) for part in parts] == [30, 30]
    for rank, part in enumerate(parts):
        assert float((part - expected[rank::2]).abs().max()) < 1e-12


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("line", ["data", "zero=2"])
def test_losses_weigh_what_counts_in_them(line: str, passes: int, together: Run, rank_pool: RankPoolFactory) -> None:
    """One process has the samples of both ranks, and of all passes, in one batch."""
    expected = rank_pool(2).run(_alone_with_batches_of, (12 * passes,))[0]
    found = together(line, kind="counting", accumulate_grad_batches=passes)
    assert distance(found["state"], expected["state"]) < 1e-12
    other = together(line, kind="unweighted", accumulate_grad_batches=passes)
    assert distance(other["state"], expected["state"]) > 1e-4


def _alone_with_batches_of(size: int) -> Any:
    from lightning_runs import train

    return train(size, kind="counting") if os.environ.get("UNIDIST_RANK", "0") == "0" else None
