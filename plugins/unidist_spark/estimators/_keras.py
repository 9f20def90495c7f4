"""`KerasEstimator`: trains a Keras model on the rows of a DataFrame."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import cloudpickle
import numpy as np
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_spark.backend import Backend
from unidist_spark.estimators.base import (
    Array,
    Columns,
    Predict,
    RankTraining,
    SparkEstimator,
    SparkModel,
    Trained,
    compressor_name,
)
from unidist_spark.estimators.parameters import keeps_arguments
from unidist_spark.row_groups import RankRows
from unidist_spark.store import Store

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class KerasTraining(RankTraining):
    """Trains a model by `fit`."""

    @override
    def run(self) -> Trained:
        import keras

        import unidist.keras as ud
        from unidist_zero import gathered

        ud.init()
        ud.seed(self.seed)
        model, optimizer, compiled, callbacks, checkpoint = _load(self.pickled)
        shapes = [weight.shape for weight in model.weights]
        model, optimizer = ud.distribute(model, optimizer)
        model.compile(optimizer, **compiled, jit_compile=False)
        trained = self.resume(ud, model, optimizer)
        if self.scales_rate:
            optimizer.learning_rate = optimizer.learning_rate * self.rate_factor(trained, ud.data_size())
            for callback in callbacks:
                if isinstance(callback, ud.callbacks.LearningRateScheduleCallback):
                    callback.initial_lr = float(optimizer.learning_rate)
        rows, kept = self.rank_rows(ud.data_rank(), ud.data_size())
        outputs = self._output_shapes(rows)
        trained.widths = [int(np.prod(shape)) for shape in outputs]
        current = trained.epochs

        def begin(epoch: int, logs: Any) -> None:
            nonlocal current
            current = epoch

        def end(epoch: int, logs: Mapping[str, float]) -> None:
            optimizer.flush()
            for name, mean in logs.items():
                trained.history.setdefault(name, []).append(mean)
            trained.epochs = epoch + 1
            self.check_whole(shapes, [weight.shape for weight in model.weights])
            self.save(ud, model, optimizer, trained)
            with gathered(model):
                if ud.rank() == 0:
                    best.save(model, epoch, logs)
                    self.write_model(self._trained(best.weights(model)))

        with tempfile.TemporaryDirectory() as folder:
            best = _BestWeights(checkpoint, folder, lambda: _load(self.pickled)[0])
            model.fit(
                self._dataset(lambda: self.batches(rows, current), self.training.count(rows), outputs),
                validation_data=self._validation_data(kept, outputs),
                initial_epoch=trained.epochs,
                epochs=self.epochs,
                shuffle=False,
                verbose=0,
                callbacks=[
                    ud.callbacks.MetricAverageCallback(),
                    *callbacks,
                    keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end),
                ],
            )
        ud.allreduce(0.0, name="unidist.spark.end")  # rank 0 has written the model
        return trained

    def _output_shapes(self, rows: RankRows) -> list[tuple[int, ...]]:
        """Return the shape of each output without the rows."""
        batch = next(self.training.batches(rows))
        outputs = _load(self.pickled)[0](_one_or_all(self.columns.inputs(batch)), training=False)
        return [tuple(output.shape[1:]) for output in (outputs if len(self.columns.labels) > 1 else [outputs])]

    def _validation_data(self, kept: RankRows | None, outputs: Sequence[tuple[int, ...]]) -> Any:
        reading = self.validation
        if kept is None or reading is None:
            return None
        return self._dataset(lambda: reading.batches(kept), reading.count(kept), outputs)

    def _dataset(self, batches: Any, num_batches: int, outputs: Sequence[tuple[int, ...]]) -> Any:
        """Return a dataset that asks for the batches of each epoch as it begins.

        Numbers have the default dtype, as `fit` gives it to arrays: functions of the script need not convert labels.
        """
        import keras
        import tensorflow as tf

        dtype = keras.config.floatx()

        def examples() -> Iterator[Any]:
            for batch in batches():
                targets = self.columns.targets(batch)
                if self.columns.label_shapes is None:
                    targets = [_as_output(target, shape) for target, shape in zip(targets, outputs, strict=True)]
                weights = () if self.columns.weight is None else (batch[self.columns.weight],)
                found = (_one_or_all(self.columns.inputs(batch)), _one_or_all(targets), *weights)
                yield tf.nest.map_structure(
                    lambda array: array.astype(dtype) if array.dtype.kind == "f" else array, found
                )

        signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), next(examples())
        )
        data = tf.data.Dataset.from_generator(examples, output_signature=signature)
        return data.apply(tf.data.experimental.assert_cardinality(num_batches))

    def _trained(self, weights: Sequence[Array]) -> bytes:
        """Return the model that was given with these weights, for `_load`."""
        dtype, objects, _ = pickle.loads(self.pickled)
        plain = _load(self.pickled)[0]
        plain.set_weights(weights)
        return cloudpickle.dumps((dtype, objects, cloudpickle.dumps(plain)))


class KerasModel(SparkModel):
    """A trained Keras model, see `SparkModel`."""

    @property
    @override
    def model(self) -> keras.Model:
        """A copy of the trained model."""
        return _load(self._state)

    @staticmethod
    @override
    def _predictor(state: bytes, columns: Columns) -> Predict:
        model = _load(state)

        def predict(inputs: list[Array]) -> list[Array]:
            found = model(_one_or_all(inputs), training=False)
            return [each.numpy() for each in (found if len(columns.labels) > 1 else [found])]

        return predict


class _BestWeights:
    """The weights that a run returns: those that a ModelCheckpoint has saved last, or the last ones.

    Args:
        checkpoint: of Keras; None: the last ones.
        folder: where it saves.
        make: returns a model like the one that is trained.
    """

    def __init__(self, checkpoint: Any, folder: str, make: Callable[[], Any]) -> None:
        self._checkpoint = checkpoint
        self._make = make
        if checkpoint is not None:
            suffix = ".weights.h5" if checkpoint.save_weights_only else ".keras"
            checkpoint.filepath = os.path.join(folder, f"best{suffix}")

    def save(self, model: Any, epoch: int, logs: Mapping[str, float]) -> None:
        """Have the checkpoint save, if it finds the epoch better."""
        if self._checkpoint is not None:
            self._checkpoint.set_model(model)
            self._checkpoint.on_epoch_end(epoch, logs)

    def weights(self, model: Any) -> list[Array]:
        """Return the weights."""
        if self._checkpoint is None or not os.path.exists(self._checkpoint.filepath):
            return model.get_weights()
        saved = self._make()
        saved.load_weights(self._checkpoint.filepath)
        return saved.get_weights()


class KerasEstimator(SparkEstimator):
    """Trains a model of Keras 3 on `num_proc` ranks by `fit`; the arguments are those of Horovod's class.

        model = KerasEstimator(
            model=net, optimizer=keras.optimizers.Adam(0.01), loss="mse", feature_cols=["x"], label_cols=["y"],
            store=Store.create("/shared"), num_proc=2, batch_size=32, epochs=5,
        ).fit(rows)
        model.transform(rows)  # with a column y__output

    The rows are written as Parquet into the store, and each rank reads its own row groups. After each epoch the
    store has the model, and what a later `fit` with the same `run_id` needs to go on, on any number of ranks. Ranks
    compute with the default dtype (`keras.config.floatx()`) of the driver.

    Arguments can be left out, and set by `setBatchSize(...)` and so on before `fit`, which raises a ConfigurationError
    if they do not go together.

    Args:
        model: built, with an input for each feature column, in their order.
        optimizer: a name, or an optimizer of Keras.
        loss: as `compile` takes it: for each label column, or one for all.
        metrics: as `compile` takes them.
        loss_weights: as `compile` takes them.
        feature_cols: numbers, lists of numbers, or vectors of Spark's ML.
        label_cols: as `feature_cols`; with several the model returns as many outputs.
        sample_weight_col: column of a weight for each row, as `fit` takes weights of samples.
        store: for rows and checkpoints; all executors reach it.
        custom_objects: the model's own classes and functions, by name, where they are not registered.
        callbacks: of Keras, on every rank; they see the means of all ranks.
        checkpoint_callback: a ModelCheckpoint of Keras, or BestModelCheckpoint, which chooses the epoch whose weights
            are returned; it needs no path. Default: the last epoch.
        backend: where ranks run, such as a `SparkBackend`, instead of `num_proc`.
        num_proc: number of ranks; default: as `run`.
        batch_size: rows of each rank's batches.
        val_batch_size: as `batch_size`, of rows for validation; default: the same.
        epochs: number of passes over the rows.
        train_steps_per_epoch: so many batches of each rank instead of all its rows.
        validation_steps_per_epoch: as `train_steps_per_epoch`, of rows for validation.
        backward_passes_per_step: batches of each update: `accumulate` of a strategy.
        gradient_compression: how gradients travel, `compression` of the strategy `data`: "fp16", "powersgd/rank=2", or
            `Compression.fp16`.
        validation: share of the rows that are kept for validation, or a column that is true for those; None: none.
        input_shapes: of each feature with the rows, (-1, 8, 8); None: those of the model's inputs.
        label_shapes: as `input_shapes`; None: that of the output, if it has as many numbers.
        shuffle: each epoch has another order of each rank's rows.
        random_seed: of the order, and of dropout.
        inmemory_cache_all: each rank reads its rows once, and keeps them.
        partitions_per_process: Parquet files for each rank.
        run_id: name of the run in the store; one that is there already is resumed, up to `epochs` in all. Default: a
            random one.
        strategy: as `--strategy`; one that keeps the model whole on each rank, or `zero`.
        engine: as `--engine`.
        env: variables of every rank.
        backend_env: Horovod's name of `env`.
        verbose: 0: nothing is said.
        others: arguments of Horovod's that cannot be followed. `fit` refuses all values but those that say nothing.

    Raises:
        TypeError: there is no such argument.
    """

    training = KerasTraining
    trained_model = KerasModel

    @keeps_arguments
    def __init__(
        self,
        *,
        model: keras.Model | None = None,
        optimizer: str | keras.optimizers.Optimizer | None = None,
        loss: Any = None,
        metrics: Any = None,
        loss_weights: Any = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        store: Store | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        checkpoint_callback: keras.callbacks.ModelCheckpoint | None = None,
        backend: Backend | None = None,
        num_proc: int | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        epochs: int = 1,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        backward_passes_per_step: int = 1,
        gradient_compression: Any = None,
        validation: float | str | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        shuffle: bool = True,
        random_seed: int | None = None,
        inmemory_cache_all: bool = False,
        partitions_per_process: int = 1,
        run_id: str | None = None,
        strategy: str | None = None,
        engine: str | None = None,
        env: Mapping[str, str] | None = None,
        backend_env: Mapping[str, str] | None = None,
        verbose: int = 1,
        **others: Any,
    ) -> None:
        super().__init__()

    @override
    def _pickled(self, values: Mapping[str, Any]) -> bytes:
        import keras

        model, checkpoint = values["model"], values["checkpoint_callback"]
        if not isinstance(model, keras.Model):
            raise ConfigurationError(
                f"the model is a {type(model).__module__}.{type(model).__qualname__}: give a model of Keras 3. Where "
                "TF_USE_LEGACY_KERAS=1 is set, tf.keras is another Keras; leave that out."
            )
        if not model.built:
            raise ConfigurationError(
                f"the model {model.name!r} is not built, so it has no weights to send: give it an Input, or call "
                "model.build(shape)."
            )
        if checkpoint is not None and checkpoint.save_freq != "epoch":
            raise ConfigurationError(
                f"checkpoint_callback has save_freq={checkpoint.save_freq!r}: it chooses among epochs; leave it out."
            )
        compiled = {name: values[name] for name in ("loss", "metrics", "loss_weights")}
        optimizer = keras.optimizers.get(values["optimizer"])
        return _dump((model, optimizer, compiled, list(values["callbacks"] or ()), checkpoint), values)

    @override
    def _input_shapes(self, model: Any) -> Sequence[Sequence[int]] | None:
        shapes = [tuple(each.shape[1:]) for each in getattr(model, "inputs", None) or ()]
        return None if not shapes or any(None in shape for shape in shapes) else [(-1, *shape) for shape in shapes]

    @override
    def _compression(self, given: Any) -> str:
        from unidist.keras import Compression

        return compressor_name(given, Compression)

    @override
    def _to_bytes(self) -> bytes:
        return _dump(self.given(), self.given())

    @classmethod
    @override
    def _of_bytes(cls, state: bytes) -> Self:
        return cls(**_load(state))


def _dump(given: Any, values: Mapping[str, Any]) -> bytes:
    """Pickle for `_load`; `values` may have custom objects."""
    import keras

    return cloudpickle.dumps(
        (keras.config.floatx(), dict(values.get("custom_objects") or {}), cloudpickle.dumps(given))
    )


def _load(pickled: bytes) -> Any:
    """Return what was pickled with the default dtype and the custom objects that it needs."""
    import keras

    dtype, objects, given = pickle.loads(pickled)
    keras.config.set_floatx(dtype)
    with keras.saving.custom_object_scope(objects):
        return pickle.loads(given)


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _as_output(target: Array, shape: tuple[int, ...]) -> Array:
    """Return labels in the shape of the model's output, if they have as many numbers."""
    whole = (len(target), *shape)
    return target.reshape(whole) if target.size == np.prod(whole) else target
