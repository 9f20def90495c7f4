"""`KerasEstimator`: the numbers of one process on the same batches, under ZeRO, resumed, and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidist.errors import ConfigurationError
from unidist_spark import KerasEstimator, Store
from unidist_spark.estimators import horovod
from unidist_spark.estimators._keras import KerasTraining
from unidist_spark.estimators.base import Columns, Reading
from unidist_spark.row_groups import RankRows

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; `make test-integrations` has it")
import keras

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

StartSpark = Callable[[str], Any]
NUM_ROWS = 24


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


class Scale(keras.layers.Layer):
    """A layer that no executor can import."""

    def call(self, inputs: Any) -> Any:
        return 2 * inputs


def _net() -> Any:
    keras.utils.set_random_seed(0)
    inputs = [keras.Input((2,)), keras.Input((1,))]
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()(inputs))
    return keras.Model(inputs, Scale()(keras.layers.Dense(1)(hidden)))


def _rows(spark: Any) -> Any:
    random = np.random.default_rng(0)
    found = [
        ([float(a), float(b)], float(c), float(a - b), bool(n % 4 == 0), (1 + n) / NUM_ROWS)
        for n, (a, b, c) in enumerate(random.normal(size=(NUM_ROWS, 3)))
    ]
    return spark.createDataFrame(found, "x array<double>, z double, y double, keep boolean, w double").coalesce(1)


def _estimator(folder: Path, **options: Any) -> KerasEstimator:
    return KerasEstimator(**{**_arguments(folder), **options})


def _arguments(folder: Path) -> dict[str, Any]:
    return {
        "model": _net(),
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": "mse",
        "metrics": ["mae"],
        "feature_cols": ["x", "z"],
        "label_cols": ["y"],
        "store": Store.create(str(folder)),
        "custom_objects": {"Scale": Scale},
        "num_proc": 2,
        "batch_size": 4,
        "epochs": 2,
        "run_id": "one",
        "shuffle": False,
    }


def test_it_trains_as_one_process_resumes_on_fewer_ranks_and_predicts(start_spark: StartSpark, tmp_path: Path) -> None:
    spark = start_spark("local[2]")
    rows = _rows(spark)
    fitted = _estimator(tmp_path, validation="keep", strategy="zero=2").fit(rows)
    net, optimizer = _net(), keras.optimizers.Adam(0.02)
    losses = _train_alone(net, optimizer, tmp_path, 2, num_parts=2, num_files=2)
    assert _difference(fitted.model, net) < 1e-12
    assert np.allclose(fitted.history["loss"], losses, rtol=0, atol=1e-12)
    assert {name: len(values) for name, values in fitted.history.items()} == {
        "loss": 2, "mae": 2, "val_loss": 2, "val_mae": 2,
    }  # fmt: skip
    other = _net()
    _train_alone(other, keras.optimizers.Adam(0.02), tmp_path, 2, num_parts=1, num_files=2)
    assert _difference(fitted.model, other) > 1e-6  # what a rank alone would have found
    for row in fitted.transform(rows).collect():
        alone = net([np.array([row["x"]]), np.array([[row["z"]]])]).numpy().item()
        assert abs(row["y__output"] - alone) < 1e-12

    resumed = _estimator(tmp_path, validation="keep", num_proc=1, epochs=3).fit(rows)
    losses += _train_alone(net, optimizer, tmp_path, 1, num_parts=1, num_files=1)
    assert _difference(resumed.model, net) < 1e-12
    assert np.allclose(resumed.history["loss"], losses, rtol=0, atol=1e-12)


def test_horovods_arguments_have_the_numbers_of_one_process(start_spark: StartSpark, tmp_path: Path) -> None:
    from unidist.tensorflow.keras.callbacks import BestModelCheckpoint, LearningRateScheduleCallback

    rows = _rows(start_spark("local[2]"))
    given = _arguments(tmp_path)
    given |= {"callbacks": [LearningRateScheduleCallback(initial_lr=9.0, multiplier=1.0)]}  # begins with the rate, 0.04
    given |= {"sample_weight_col": "w", "checkpoint_callback": BestModelCheckpoint("loss", mode="max")}
    estimator = horovod.KerasEstimator(**given, strategy="zero=3")
    estimator.save(str(tmp_path / "estimator"))
    loaded = horovod.KerasEstimator.load(str(tmp_path / "estimator"))
    fitted = loaded.fit(rows)
    losses = fitted.getHistory()["loss"]
    assert losses[0] > losses[1]  # so the checkpoint chooses the first epoch
    for rate, weight, num_parts in ((0.04, "w", 2), (0.02, "w", 2), (0.04, None, 2), (0.04, "w", 1)):
        net = _net()
        optimizer = keras.optimizers.Adam(rate)
        _train_alone(net, optimizer, tmp_path, 1, num_parts=num_parts, num_files=2, weight=weight)
        assert (_difference(fitted.model, net) < 1e-12) == (rate == 0.04 and weight == "w" and num_parts == 2)


def test_labels_have_the_default_dtype_and_the_shape_of_the_output() -> None:
    keras.config.set_floatx("float32")
    training = KerasTraining(
        pickled=b"", columns=Columns(("x",), ("y", "z")), training=Reading(4, None), validation=None, epochs=1,
        shuffle=False, seed=0, scales_rate=False, keeps_rows=False, store=Store.create("/tmp"), data_id=None,
        run_id="one", is_resumed=False,
    )  # fmt: skip
    batch = {"x": np.zeros((4, 2)), "y": np.zeros(4), "z": np.zeros(4, np.int64)}
    _, (number, label) = training._dataset(lambda: iter([batch]), 1, [(1,), (3,)]).element_spec
    assert (number.dtype.name, number.shape.as_list()) == ("float32", [None, 1])
    assert (label.dtype.name, label.shape.as_list()) == ("int64", [None])  # a class, of three


def test_bad_input_is_an_error(start_spark: StartSpark, tmp_path: Path) -> None:
    checkpoint = keras.callbacks.ModelCheckpoint("a.keras", save_freq=5)
    for options, message in (
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, r"the model .* is not built"),
        ({"model": object()}, r"the model is a builtins\.object: give a model of Keras 3"),
        ({"label_cols": []}, r"label_cols=\[\]"),
        ({"epochs": 0}, "epochs=0"),
        ({"checkpoint_callback": checkpoint}, "checkpoint_callback has save_freq=5"),
        ({"feature_cols": ["x", "v"]}, r"no columns \['v'\]; it has \['x', 'z', 'y', 'keep', 'w'\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            _estimator(tmp_path, **options).fit(_rows(start_spark("local[2]")))


def _train_alone(
    net: Any,
    optimizer: Any,
    folder: Path,
    epochs: int,
    *,
    num_parts: int,
    num_files: int,
    weight: str | None = None,
) -> list[float]:
    """Train on the batches of `num_parts` of `num_files` ranks together; return the loss of each epoch."""
    path = str(folder / "intermediate_train_data" / "one")
    names = ["x", "z", "y", *([weight] if weight else [])]
    parts = [RankRows(path, rank=rank, num_ranks=num_files, columns=names) for rank in range(num_parts)]
    net.compile(optimizer, "mse", jit_compile=False)
    losses = []
    for _ in range(epochs):
        sums = np.zeros(2)
        for batches in zip(*(part.batches(4, shuffle_seed=None) for part in parts), strict=True):
            x, z, y, *w = (np.concatenate([batch[name] for batch in batches]) for name in names)
            net.reset_metrics()
            sums += float(net.train_on_batch([x, z[:, None]], y, *w)) * len(y), len(y)
        losses.append(sums[0] / sums[1])
    return losses


def _difference(found: Any, wanted: Any) -> float:
    pairs = zip(found.get_weights(), wanted.get_weights(), strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)
