"""Arguments of the estimators: Horovod's names, getters and setters, and what is refused. Without Spark's Java."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unidist.errors import ConfigurationError
from unidist_spark import KerasEstimator, SparkBackend, Store, TorchEstimator, TorchModel
from unidist_spark.estimators._torch import TorchTraining
from unidist_spark.estimators.base import Columns, Reading, Trained

OF_BOTH = """
    backend batch_size callbacks categorical_cols compress_sparse_cols continuous_cols data_module epochs feature_cols
    gradient_compression inmemory_cache_all label_cols label_shapes loss loss_weights metrics model mp_start_method
    num_proc optimizer partitions_per_process random_seed reader_pool_type run_id sample_weight_col shuffle
    shuffle_buffer_size store tensorflow_dataset_prefetch_buffer_size train_reader_num_workers train_steps_per_epoch
    transformation_edit_fields transformation_fn transformation_removed_fields use_gpu val_batch_size
    val_reader_num_workers validation validation_steps_per_epoch verbose backward_passes_per_step
"""
OF_TORCH = "input_shapes loss_constructors train_minibatch_fn"
OF_KERAS = "backend_env checkpoint_callback custom_objects"
GIVEN: dict[str, Any] = {"feature_cols": ["x"], "label_cols": ["y"], "loss": nn.functional.mse_loss}


def _estimator(**options: Any) -> TorchEstimator:
    net = nn.Linear(2, 1)
    given = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "store": Store.create("/tmp")}
    return TorchEstimator(**{**GIVEN, **given, **options})


@pytest.mark.parametrize(("kind", "names"), [(TorchEstimator, OF_TORCH), (KerasEstimator, OF_KERAS)])
def test_every_argument_of_horovods_class_has_a_getter_and_a_setter(kind: Any, names: str) -> None:
    estimator = kind()
    for name in (OF_BOTH + names).split():
        assert estimator.hasParam(name), name
    assert estimator.setBatchSize(8).setEpochs(3) is estimator
    assert (estimator.getBatchSize(), estimator.getEpochs(), estimator.getValidation()) == (8, 3, None)
    assert estimator.setParams(batch_size=4).getBatchSize() == 4
    assert estimator.setTrainReaderNumWorker(2).setInMemoryCacheAll(True).getInMemoryCacheAll()
    copied = estimator.copy({estimator.epochs: 5})
    assert (copied.getEpochs(), estimator.getEpochs()) == (5, 3)
    with pytest.raises(TypeError, match=r"has no arguments \['batchsize'\]"):
        kind(batchsize=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transformation_fn": len}, "transformation_fn=.* cannot be followed: transform the DataFrame before fit"),
        ({"use_gpu": True}, "use_gpu=True cannot be followed"),
        ({"train_reader_num_workers": 7}, "train_reader_num_workers=7"),
        ({"metrics": [[len]]}, "compute them from the columns of transform"),
        ({"loss": []}, r"0 losses for label_cols=\['y'\]"),
        ({"loss": None, "store": None}, "TorchEstimator needs loss, store"),
        ({"validation": 2.0}, "validation=2.0"),
        ({"input_shapes": [[-1], [-1]]}, r"2 input_shapes for the columns \['x'\]"),
        ({"loss_weights": [1.0, 2.0]}, r"2 loss_weights for the columns \['y'\]"),
        ({"val_batch_size": 0}, "val_batch_size=0: give at least 1"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"gradient_compression": len}, "give a name, or Compression.none"),
        ({"backend": SparkBackend(2), "num_proc": 3}, "backend and num_proc=3"),
        ({"num_proc": 0}, "num_proc=0"),
    ],
)
def test_arguments_that_cannot_be_followed_are_errors_before_anything_is_written(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _estimator(**{"num_proc": None if "backend" in options else 2, **options}).fit(None)


def test_values_of_horovods_that_say_nothing_are_no_errors() -> None:
    nothing = {
        "reader_pool_type": "thread",
        "use_gpu": False,
        "callbacks": [],
        "metrics": [],
        "transformation_fn": None,
    }
    assert _estimator(**nothing).values()["batch_size"] == 32


def test_passes_and_compression_become_a_strategy() -> None:
    from unidist.torch import Compression

    estimator = _estimator(
        backward_passes_per_step=2, gradient_compression=Compression.fp16, engine="tcp", env={"A": "1"},
        backend_env={"B": "2"}, num_proc=2,
    )  # fmt: skip
    expected = {"UNIDIST_STRATEGY": "accumulate=2,data:compression=fp16", "UNIDIST_ENGINE": "tcp", "A": "1", "B": "2"}
    assert estimator._checked()[0]["env"] == expected
    assert _estimator(num_proc=2).setStrategy("zero=2")._checked()[0]["env"] == {"UNIDIST_STRATEGY": "zero=2"}


def test_losses_of_labels_and_samples_are_weighted() -> None:
    columns = Columns(("x",), ("y", "z"), weight="w")
    training = _training(columns)
    outputs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])]
    batch = {"y": np.array([0.0, 0.0]), "z": np.array([1.0, 1.0]), "w": np.array([1.0, 3.0])}
    loss = training.loss(outputs, batch, [nn.functional.mse_loss] * 2, [0.25, 0.75])
    assert loss.item() == 0.25 * (1 + 3 * 4) / 2 + 0.75 * (4 + 3 * 16) / 2


def test_labels_that_are_classes_stay_as_they_are_or_as_their_shape_says() -> None:
    outputs, batch = [torch.zeros(2, 3)], {"y": np.array([[1.0], [2.0]])}
    with pytest.raises(RuntimeError):
        _training(Columns(("x",), ("y",))).loss(outputs, batch, [_of_classes], [1.0])
    columns = Columns(("x",), ("y",), label_shapes=[[-1]])
    assert _training(columns).loss(outputs, batch, [_of_classes], [1.0]).item() == pytest.approx(np.log(3))


def test_the_rate_is_multiplied_once_for_all_ranks_and_again_for_others() -> None:
    from unidist_spark.estimators import horovod

    assert horovod.TorchEstimator.scales_learning_rate
    assert not TorchEstimator.scales_learning_rate
    training, trained = _training(Columns(("x",), ("y",)), scales_rate=True), Trained()
    assert [training.rate_factor(trained, ranks) for ranks in (4, 4, 2)] == [4, 1, 0.5]
    assert _training(Columns(("x",), ("y",))).rate_factor(Trained(), 4) == 1


def test_horovods_class_for_lightning_takes_modules_of_pytorch_only() -> None:
    from unidist_spark.estimators.horovod import LightningEstimator

    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {**GIVEN, "optimizer": optimizer, "store": Store.create("/tmp"), "num_proc": 2}
    assert LightningEstimator(**given, model=net)._checked()[1].features == ("x",)
    with pytest.raises(ConfigurationError, match="profiler='simple' cannot be followed"):
        LightningEstimator(**given, model=net, profiler="simple").fit(None)
    net.training_step = len
    with pytest.raises(ConfigurationError, match="a LightningModule cannot be followed"):
        LightningEstimator(**given, model=net).fit(None)


def test_a_model_has_horovods_getters_and_names_its_columns() -> None:
    model = TorchModel(pickle.dumps(None), Columns(("x",), ("y",)), Trained(1, {"loss": [0.5]}, [1]), "run", [True])
    assert model.getOutputCols() == ["y__output"]
    assert model.setOutputCols(["p"]) is model
    assert model.getOutputCols() == ["p"]
    assert (model.getHistory(), model.getRunId()) == ({"loss": [0.5]}, "run")
    assert (model.getFeatureColumns(), model.getLabelColumns()) == (["x"], ["y"])
    for wrong in ("p", ["p", "q"]):
        with pytest.raises(ConfigurationError, match=r"give a name for each of \['y'\]"):
            model.setOutputCols(wrong)


def _of_classes(output: Any, label: Any) -> Any:
    return nn.functional.cross_entropy(output, label.long())


def _training(columns: Columns, *, scales_rate: bool = False) -> TorchTraining:
    return TorchTraining(
        pickled=b"", columns=columns, training=Reading(4, None), validation=None, epochs=1, shuffle=False, seed=0,
        scales_rate=scales_rate, keeps_rows=False, store=Store.create("/tmp"), data_id=None, run_id="one",
        is_resumed=False,
    )  # fmt: skip
