"""`KerasEstimator`: trains a Keras model on the rows of a DataFrame."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_spark.estimators.base import Array, Columns, History, Predict, RankTraining, SparkEstimator, SparkModel
from unidist_spark.store import Store

if TYPE_CHECKING:
    import keras


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

    Args:
        model: built, with an input for each feature column, in their order.
        optimizer: a name, or an optimizer of Keras.
        loss: as `compile` takes it: for each label column, or one for all.
        metrics: as `compile` takes them.
        loss_weights: as `compile` takes them.
        feature_cols: numbers, lists of numbers, or vectors of Spark's ML.
        label_cols: as `feature_cols`; with several the model returns as many outputs.
        store: for rows and checkpoints; all executors reach it.
        custom_objects: the model's own classes and functions, by name, where they are not registered.
        callbacks: of Keras, on every rank; they see the means of all ranks.
        num_proc: number of ranks; default: as `run`.
        batch_size: rows of each rank's batches.
        epochs: number of passes over the rows.
        validation: share of the rows that are kept for validation, or a column that is true for those; None: none.
        input_shapes: of each feature without the rows, (-1, 8, 8); None: (-1, n) for lists and vectors, (-1, 1) for
            numbers.
        shuffle: each epoch has another order of each rank's rows.
        random_seed: of the order, and of dropout.
        partitions_per_process: Parquet files for each rank.
        run_id: name of the run in the store; one that is there already is resumed, up to `epochs` in all. Default: a
            random one.
        strategy: as `--strategy`; one that keeps the model whole on each rank, or `zero`.
        engine: as `--engine`.
        env: variables of every rank.
        verbose: 0: nothing is said.

    Raises:
        ConfigurationError: arguments that do not go together; or the model is not built.
    """

    def __init__(
        self,
        *,
        model: keras.Model,
        optimizer: str | keras.optimizers.Optimizer,
        loss: Any,
        metrics: Any = None,
        loss_weights: Any = None,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: Store,
        custom_objects: Mapping[str, Any] | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        num_proc: int | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        validation: float | str | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        shuffle: bool = True,
        random_seed: int = 0,
        partitions_per_process: int = 1,
        run_id: str | None = None,
        strategy: str | None = None,
        engine: str | None = None,
        env: Mapping[str, str] | None = None,
        verbose: int = 1,
    ) -> None:
        import keras

        if not model.built:
            raise ConfigurationError(
                f"the model {model.name!r} is not built, so it has no weights to send: give it an Input, or call "
                "model.build(shape)."
            )
        compiled = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights}
        given = cloudpickle.dumps((model, keras.optimizers.get(optimizer), compiled, list(callbacks)))
        super().__init__(
            _KerasTraining,
            KerasModel,
            cloudpickle.dumps((keras.config.floatx(), dict(custom_objects or {}), given)),
            feature_cols=feature_cols,
            label_cols=label_cols,
            store=store,
            num_proc=num_proc,
            batch_size=batch_size,
            epochs=epochs,
            validation=validation,
            input_shapes=input_shapes,
            shuffle=shuffle,
            random_seed=random_seed,
            partitions_per_process=partitions_per_process,
            run_id=run_id,
            strategy=strategy,
            engine=engine,
            env=env,
            verbose=verbose,
        )


class KerasModel(SparkModel):
    """A trained Keras model, see `SparkModel`."""

    @property
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


@dataclass(frozen=True)
class _KerasTraining(RankTraining):
    """Trains a model by `fit`."""

    @override
    def run(self) -> History:
        import keras

        import unidist.keras as ud
        from unidist_zero import gathered

        ud.init()
        ud.seed(self.seed)
        model, optimizer, compiled, callbacks = _load(self.pickled)
        shapes = [weight.shape for weight in model.weights]
        model, optimizer = ud.distribute(model, optimizer)
        model.compile(optimizer, **compiled, jit_compile=False)
        done, history = self.resume(ud, model, optimizer)
        rows, kept = self.rank_rows(ud.data_rank(), ud.data_size())
        current = done

        def begin(epoch: int, logs: Any) -> None:
            nonlocal current
            current = epoch

        def end(epoch: int, logs: Mapping[str, float]) -> None:
            optimizer.flush()
            for name, mean in logs.items():
                history.setdefault(name, []).append(mean)
            self.check_whole(shapes, [weight.shape for weight in model.weights])
            self.save(ud, model, optimizer, epoch + 1, history)
            with gathered(model):
                if ud.rank() == 0:
                    self.write_model(self._trained(model.get_weights()))

        model.fit(
            self._dataset(lambda: self.batches(rows, current), rows.num_batches(self.batch_size)),
            validation_data=None
            if kept is None
            else self._dataset(
                lambda: kept.batches(self.batch_size, shuffle_seed=None), kept.num_batches(self.batch_size)
            ),
            initial_epoch=done,
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
        return history

    def _dataset(self, batches: Any, num_batches: int) -> Any:
        """Return a dataset that asks for the batches of each epoch as it begins."""
        import tensorflow as tf

        def pairs() -> Iterator[Any]:
            for batch in batches():
                yield (
                    _one_or_all(self.columns.inputs(batch)),
                    _one_or_all([batch[name] for name in self.columns.labels]),
                )

        signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), next(pairs())
        )
        data = tf.data.Dataset.from_generator(pairs, output_signature=signature)
        return data.apply(tf.data.experimental.assert_cardinality(num_batches))

    def _trained(self, weights: Sequence[Array]) -> bytes:
        """Return the model that was given with these weights, for `_load`."""
        dtype, objects, _ = pickle.loads(self.pickled)
        plain = _load(self.pickled)[0]
        plain.set_weights(weights)
        return cloudpickle.dumps((dtype, objects, cloudpickle.dumps(plain)))


def _load(pickled: bytes) -> Any:
    """Return what was pickled with the default dtype and the custom objects that it needs."""
    import keras

    dtype, objects, given = pickle.loads(pickled)
    keras.config.set_floatx(dtype)
    with keras.saving.custom_object_scope(objects):
        return pickle.loads(given)


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
