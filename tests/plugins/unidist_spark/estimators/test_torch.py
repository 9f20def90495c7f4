"""`TorchEstimator`: the numbers of one process on the same batches, validation, vectors and predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unidist_spark import SparkBackend, Store, TorchEstimator, TorchModel
from unidist_spark.estimators import horovod
from unidist_spark.row_groups import RankRows

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

StartSpark = Callable[[str], Any]
NUM_ROWS = 24


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _rows(spark: Any) -> Any:
    random = np.random.default_rng(0)
    found = [
        ([float(a), float(b)], float(a - b), bool(n % 4 == 0), (1 + n) / NUM_ROWS)
        for n, (a, b) in enumerate(random.normal(size=(NUM_ROWS, 2)))
    ]
    return spark.createDataFrame(found, "x array<double>, y double, keep boolean, w double")


def _estimator(folder: Path, **options: Any) -> TorchEstimator:
    return TorchEstimator(**{**_arguments(folder), **options})


def _arguments(folder: Path) -> dict[str, Any]:
    net = _net()
    return {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "loss": nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "store": Store.create(str(folder)),
        "num_proc": 2,
        "batch_size": 4,
        "epochs": 2,
        "run_id": "one",
    }


def test_it_trains_as_one_process_and_predicts(start_spark: StartSpark, tmp_path: Path) -> None:
    spark = start_spark("local[2]")
    rows = _rows(spark)
    fitted = _estimator(tmp_path, shuffle=False, strategy="zero=2").fit(rows)
    expected, losses = _alone(str(tmp_path / "intermediate_train_data" / "one"), num_parts=2)
    for name, value in fitted.model.state_dict().items():
        assert (value - expected.state_dict()[name]).abs().max() < 1e-12
    assert np.allclose(fitted.history["loss"], losses, rtol=0, atol=1e-12)
    wrong, _ = _alone(str(tmp_path / "intermediate_train_data" / "one"), num_parts=1)
    assert (fitted.model[0].weight - wrong[0].weight).abs().max() > 1e-6  # what a rank alone would have found
    fitted.setOutputCols(["found"]).save(str(tmp_path / "fitted"))
    for model in fitted, TorchModel.load(str(tmp_path / "fitted")):
        predicted = model.transform(rows)
        assert predicted.columns == [*rows.columns, "found"]
        assert predicted.count() == NUM_ROWS
        for row in predicted.collect():
            with torch.no_grad():
                expected_here = expected(torch.tensor(row["x"], dtype=torch.float64)).item()
            assert abs(row["found"] - expected_here) < 1e-12


def test_horovods_arguments_have_the_numbers_of_one_process(start_spark: StartSpark, tmp_path: Path) -> None:
    rows = _rows(start_spark("local[2]"))
    given = {
        "run_id": None, "num_proc": None, "backend": SparkBackend(num_proc=2), "backward_passes_per_step": 2,
        "sample_weight_col": "w", "shuffle": False, "inmemory_cache_all": True,
    }  # fmt: skip
    estimator = horovod.TorchEstimator(**{**_arguments(tmp_path), **given})
    estimator.save(str(tmp_path / "estimator"))
    fitted = horovod.TorchEstimator.load(str(tmp_path / "estimator")).setRunId("one").fit(rows)
    path = str(tmp_path / "intermediate_train_data" / "one")
    expected, losses = _alone(path, num_parts=2, rate=0.2, weight="w", passes=2)
    assert _difference(fitted.model, expected) < 1e-12
    assert np.allclose(fitted.history["loss"], losses, rtol=0, atol=1e-12)
    for wrong in ({"rate": 0.1}, {"passes": 1}, {"weight": None}, {"num_parts": 1}):
        other, _ = _alone(path, **{"num_parts": 2, "rate": 0.2, "weight": "w", "passes": 2, **wrong})
        assert _difference(fitted.model, other) > 1e-6

    again = estimator.copy({estimator.sample_weight_col: None, estimator.train_steps_per_epoch: 1})
    parquet = again.setRunId("two").setEpochs(1).fit_on_parquet(dataset_idx="one")
    expected, _ = _alone(path, num_parts=2, rate=0.2, passes=2, epochs=1, steps=1)
    assert _difference(parquet.model, expected) < 1e-12


def test_a_class_of_the_script_and_outputs_of_several_numbers(start_spark: StartSpark, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    net = Net()
    rows = _rows(start_spark("local[2]"))
    fitted = _estimator(
        tmp_path,
        num_proc=1,
        epochs=1,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=lambda output, label: nn.functional.cross_entropy(output, (label > 0).long()),
    ).fit(rows)
    assert len(fitted.transform(rows).first()["y__output"]) == 3


def test_vectors_and_validation_by_a_column(start_spark: StartSpark, tmp_path: Path) -> None:
    from pyspark.ml.functions import array_to_vector

    spark = start_spark("local[2]")
    rows = _rows(spark).withColumn("x", array_to_vector("x"))
    fitted = _estimator(tmp_path, validation="keep").fit(rows)
    assert len(fitted.history["loss"]) == len(fitted.history["val_loss"]) == 2
    kept = RankRows(str(tmp_path / "intermediate_val_data" / "one"), rank=0, num_ranks=1, columns=["y"])
    assert sum(len(batch["y"]) for batch in kept.batches(100, shuffle_seed=None)) == NUM_ROWS // 4
    first = fitted.transform(rows).first()
    assert isinstance(first["y__output"], float)


def test_validation_reads_the_batches_that_it_was_told(start_spark: StartSpark, tmp_path: Path) -> None:
    given = {"validation": "keep", "val_batch_size": 2, "validation_steps_per_epoch": 1, "shuffle": False}
    fitted = _estimator(tmp_path, **given).fit(_rows(start_spark("local[2]")))
    path = str(tmp_path / "intermediate_val_data" / "one")
    parts = [RankRows(path, rank=rank, num_ranks=2, columns=["x", "y"]) for rank in range(2)]

    def loss(size: int, steps: int) -> float:
        batches = [batch for part in parts for batch in list(part.batches(size, shuffle_seed=None))[:steps]]
        inputs, targets = (torch.as_tensor(np.concatenate([batch[name] for batch in batches])) for name in ("x", "y"))
        with torch.no_grad():
            return nn.functional.mse_loss(fitted.model(inputs), targets.reshape(-1, 1)).item()

    assert abs(fitted.history["val_loss"][-1] - loss(2, 1)) < 1e-12
    for size, steps in ((1, 1), (2, 2)):
        assert abs(fitted.history["val_loss"][-1] - loss(size, steps)) > 1e-6


def test_sharded_parameters_are_whole_in_what_is_returned_and_are_resumed(
    start_spark: StartSpark, tmp_path: Path
) -> None:
    rows = _rows(start_spark("local[2]"))
    fitted = _estimator(tmp_path, shuffle=False, strategy="zero=3:shared=false").fit(rows)
    expected, _ = _alone(str(tmp_path / "intermediate_train_data" / "one"), num_parts=2)
    for name, value in fitted.model.state_dict().items():
        assert (value - expected.state_dict()[name]).abs().max() < 1e-12
    resumed = _estimator(tmp_path, num_proc=1, epochs=3).fit(rows)
    assert resumed.history["loss"][:2] == fitted.history["loss"]
    assert len(resumed.history["loss"]) == 3
    again = _estimator(tmp_path, num_proc=1, epochs=3).fit(rows)
    assert (again.model[0].weight == resumed.model[0].weight).all()  # nothing was left to do


def _difference(found: Any, expected: Any) -> float:
    pairs = zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def _alone(
    path: str,
    *,
    num_parts: int,
    rate: float = 0.1,
    weight: str | None = None,
    passes: int = 1,
    epochs: int = 2,
    steps: int | None = None,
) -> tuple[nn.Module, list[float]]:
    """Train on the batches of `num_parts` of the two ranks together."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    columns = ["x", "y", *([weight] if weight else [])]
    parts = [RankRows(path, rank=rank, num_ranks=2, columns=columns) for rank in range(num_parts)]
    losses = []
    for _ in range(epochs):
        total = []
        steps_of_parts = [list(part.batches(4, shuffle_seed=None))[:steps] for part in parts]
        together = list(zip(*steps_of_parts, strict=True))
        for window in (together[start : start + passes] for start in range(0, len(together), passes)):
            optimizer.zero_grad()
            for batches in window:
                inputs, targets, weights = (
                    torch.as_tensor(np.concatenate([batch[name] for batch in batches])) if name else torch.ones(())
                    for name in ("x", "y", weight)
                )
                found = nn.functional.mse_loss(net(inputs), targets.reshape(-1, 1), reduction="none")
                loss = (found.flatten() * weights).mean()
                (loss / len(window)).backward()
                total.append(loss.item())
            optimizer.step()
        losses.append(sum(total) / len(total))
    return net, losses
