"""`TorchEstimator`: the numbers of one process on the same batches, validation, vectors and predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unidist.errors import ConfigurationError
from unidist_spark import Store, TorchEstimator
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
        ([float(a), float(b)], float(a - b), bool(n % 4 == 0))
        for n, (a, b) in enumerate(random.normal(size=(NUM_ROWS, 2)))
    ]
    return spark.createDataFrame(found, "x array<double>, y double, keep boolean")


def _estimator(folder: Path, **options: Any) -> TorchEstimator:
    net = _net()
    given = {
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
    return TorchEstimator(**{**given, **options})


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
    predicted = fitted.transform(rows).collect()
    assert len(predicted) == NUM_ROWS
    for row in predicted:
        with torch.no_grad():
            assert abs(row["y__output"][0] - fitted.model(torch.tensor(row["x"], dtype=torch.float64)).item()) < 1e-12


def test_vectors_and_validation_by_a_column(start_spark: StartSpark, tmp_path: Path) -> None:
    from pyspark.ml.functions import array_to_vector

    spark = start_spark("local[2]")
    rows = _rows(spark).withColumn("x", array_to_vector("x"))
    fitted = _estimator(tmp_path, validation="keep").fit(rows)
    assert len(fitted.history["loss"]) == len(fitted.history["val_loss"]) == 2
    kept = RankRows(str(tmp_path / "intermediate_val_data" / "one"), rank=0, num_ranks=1, columns=["y"])
    assert sum(len(batch["y"]) for batch in kept.batches(100, shuffle_seed=None)) == NUM_ROWS // 4
    first = fitted.transform(rows).first()
    assert len(first["y__output"]) == 1


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


def test_arguments_that_do_not_go_together_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="0 losses for label_cols"):
        _estimator(tmp_path, loss=[])
    with pytest.raises(ConfigurationError, match="validation=2"):
        _estimator(tmp_path, validation=2.0)
    with pytest.raises(ConfigurationError, match="2 input_shapes for 1 feature_cols"):
        _estimator(tmp_path, input_shapes=[[-1], [-1]])
    with pytest.raises(ConfigurationError, match="nowhere"):
        Store.create("nowhere://x")


def _alone(path: str, *, num_parts: int) -> tuple[nn.Module, list[float]]:
    """Train on the batches of `num_parts` of the two ranks together."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    parts = [RankRows(path, rank=rank, num_ranks=2, columns=["x", "y"]) for rank in range(num_parts)]
    losses = []
    for _ in range(2):
        total = []
        for batches in zip(*(part.batches(4, shuffle_seed=None) for part in parts), strict=True):
            inputs = torch.as_tensor(np.concatenate([batch["x"] for batch in batches]))
            targets = torch.as_tensor(np.concatenate([batch["y"] for batch in batches])).reshape(-1, 1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            total.append(loss.item())
        losses.append(sum(total) / len(total))
    return net, losses
