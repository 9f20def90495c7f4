"""Code shared by the estimators of all frameworks: arguments, rows, checkpoints, predictions."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from pyspark.ml import Estimator, Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_spark.row_groups import RankRows
from unidist_spark.runner import run
from unidist_spark.store import Store

Array: TypeAlias = "np.ndarray[Any, Any]"
History: TypeAlias = dict[str, list[float]]
Predict: TypeAlias = Callable[[list[Array]], list[Array]]

_VALIDATION_SEED = 0


@dataclass(frozen=True)
class Columns:
    """Which columns go into the model, and in which shape.

    Args:
        features: names, in the order of the model's inputs.
        labels: names, in the order of the model's outputs.
        shapes: of each feature; None: (-1, n) for lists and vectors, (-1, 1) for numbers.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    shapes: Sequence[Sequence[int]] | None

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.features, *self.labels)

    def inputs(self, batch: Mapping[str, Array]) -> list[Array]:
        """Return the model's inputs."""
        arrays = [batch[name] for name in self.features]
        shapes = self.shapes or [(len(array), -1) for array in arrays]
        return [array.reshape(tuple(shape)) for array, shape in zip(arrays, shapes, strict=True)]


@dataclass(frozen=True)
class RankTraining(ABC):
    """A training as every rank runs it; Spark carries it there.

    Args:
        pickled: model, optimizer and whatever else comes from the user.
        columns: of the rows.
        batch_size: rows of each rank's batches.
        epochs: number of passes over the rows.
        shuffle: each epoch has another order of each rank's rows.
        seed: of the order, and of dropout.
        store: for rows and checkpoints.
        run_id: name of the run in the store.
        is_validated: some of the rows are for validation.
        is_resumed: the run goes on from its last complete epoch.
    """

    pickled: bytes
    columns: Columns
    batch_size: int
    epochs: int
    shuffle: bool
    seed: int
    store: Store
    run_id: str
    is_validated: bool
    is_resumed: bool

    @abstractmethod
    def run(self) -> History:
        """Train on this rank and return the losses of each epoch, the same on every rank."""

    def rank_rows(self, rank: int, num_ranks: int) -> tuple[RankRows, RankRows | None]:
        """Return a rank's rows for training, and those for validation if there are any."""
        place: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks, "columns": self.columns.names}
        rows = RankRows(self.store.get_train_data_path(self.run_id), **place)
        kept = RankRows(self.store.get_val_data_path(self.run_id), **place) if self.is_validated else None
        return rows, kept

    def batches(self, rows: RankRows, epoch: int) -> Iterator[dict[str, Array]]:
        """Return the batches of an epoch of training."""
        seed = self.seed * 1_000_003 + epoch if self.shuffle else None
        return rows.batches(self.batch_size, shuffle_seed=seed)

    def resume(self, ud: Any, model: Any, optimizer: Any) -> tuple[int, History]:
        """Load the last complete epoch of a run that is resumed. Collective.

        Args:
            ud: the facade of the framework.
            model: of `distribute`.
            optimizer: of `distribute`.

        Returns:
            The number of epochs that are done, and their history.
        """
        if not self.is_resumed:
            return 0, {}
        loaded = ud.load(self.store.get_state_path(self.run_id), model, optimizer)
        return int(loaded.step or 0), {name: list(values) for name, values in loaded.extra["history"].items()}

    def save(self, ud: Any, model: Any, optimizer: Any, epochs: int, history: History) -> None:
        """Save for `resume`, in a store that is a folder. Collective, with the same arguments."""
        state = self.store.get_state_path(self.run_id)
        if state:
            ud.save(state, model, optimizer, step=epochs, keep=1, extra={"history": history})

    def check_whole(self, shapes: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> None:
        """Check that the trained weights have the shapes of the model that was given.

        Raises:
            ConfigurationError: they are sharded by the strategy.
        """
        if [tuple(shape) for shape in shapes] != [tuple(shape) for shape in found]:
            raise ConfigurationError(
                "this strategy shards the model, which an estimator keeps whole on each rank: use one that does not, "
                "such as zero=2, or train by unidist.spark.run and save with ud.save."
            )

    def write_model(self, state: bytes) -> None:
        """Write the trained model. On rank 0 alone."""
        self.store.write(self.store.get_checkpoint_path(self.run_id), state)


class SparkEstimator(Estimator):
    """Trains a model on `num_proc` ranks. Arguments: see the subclasses.

    Raises:
        ConfigurationError: arguments that do not go together.
    """

    def __init__(
        self,
        training: type[RankTraining],
        model: type[SparkModel],
        pickled: bytes,
        *,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: Store,
        num_proc: int | None,
        batch_size: int,
        epochs: int,
        validation: float | str | None,
        input_shapes: Sequence[Sequence[int]] | None,
        shuffle: bool,
        random_seed: int,
        partitions_per_process: int,
        run_id: str | None,
        strategy: str | None,
        engine: str | None,
        env: Mapping[str, str] | None,
        verbose: int,
    ) -> None:
        super().__init__()
        if not label_cols or not feature_cols:
            raise ConfigurationError(
                f"label_cols={list(label_cols)}, feature_cols={list(feature_cols)}: give at least one of each."
            )
        if input_shapes is not None and len(input_shapes) != len(feature_cols):
            raise ConfigurationError(f"{len(input_shapes)} input_shapes for {len(feature_cols)} feature_cols.")
        if isinstance(validation, float) and not 0 < validation < 1:
            raise ConfigurationError(f"validation={validation}: a share of the rows is above 0 and below 1.")
        if batch_size < 1 or epochs < 1:
            raise ConfigurationError(f"batch_size={batch_size}, epochs={epochs}: give at least 1 of each.")
        self._columns = Columns(tuple(feature_cols), tuple(label_cols), input_shapes)
        self._validation = validation
        self._num_proc = num_proc
        self._partitions_per_process = partitions_per_process
        self._run_id = run_id
        self._run: dict[str, Any] = {"strategy": strategy, "engine": engine, "env": env, "verbose": verbose}
        self._training = training
        self._model = model
        self._arguments: dict[str, Any] = {
            "columns": self._columns,
            "batch_size": batch_size,
            "epochs": epochs,
            "shuffle": shuffle,
            "seed": random_seed,
            "store": store,
            "is_validated": validation is not None,
        }
        self._store = store
        self._pickled = pickled

    @override
    def _fit(self, dataset: DataFrame) -> SparkModel:
        missing = [name for name in self._columns.names if name not in dataset.columns]
        if missing:
            raise ConfigurationError(f"the DataFrame has no columns {missing}; it has {dataset.columns}.")
        num_proc = self._num_proc or dataset.sparkSession.sparkContext.defaultParallelism
        run_id = self._run_id or f"run-{uuid.uuid4().hex[:12]}"
        rows, kept = self._divided(dataset)
        num_files = num_proc * self._partitions_per_process
        self._write(rows, self._store.get_train_data_path(run_id), num_files)
        if kept is not None:
            self._write(kept, self._store.get_val_data_path(run_id), num_files)
        training = self._training(
            pickled=self._pickled, run_id=run_id, is_resumed=self._store.has_state(run_id), **self._arguments
        )
        histories = run(training.run, num_proc=num_proc, **self._run)
        state = self._store.read(self._store.get_checkpoint_path(run_id))
        return self._model(state, self._columns, histories[0], run_id)

    def _divided(self, dataset: DataFrame) -> tuple[DataFrame, DataFrame | None]:
        if self._validation is None:
            return dataset, None
        if isinstance(self._validation, str):
            column = F.col(self._validation).cast("boolean")
            return dataset.filter(~column), dataset.filter(column)
        share = self._validation
        rows, kept = dataset.randomSplit([1 - share, share], seed=_VALIDATION_SEED)
        return rows, kept

    def _write(self, rows: DataFrame, path: str, num_files: int) -> None:
        types = {field.name: field.dataType for field in rows.schema.fields}
        columns = [
            vector_to_array(name).alias(name) if isinstance(types[name], VectorUDT) else F.col(name)
            for name in self._columns.names
        ]
        rows.select(*columns).repartition(num_files).write.mode("overwrite").parquet(path)


class SparkModel(Model):
    """A trained model: adds an output column for each label, an array of numbers named `LABEL__output`.

    Args:
        state: what `RankTraining.write_model` got.
        columns: that it was trained on.
        history: losses of each epoch: `{"loss": [...], "val_loss": [...]}`.
        run_id: name of the run in the store.
    """

    def __init__(self, state: bytes, columns: Columns, history: History, run_id: str) -> None:
        super().__init__()
        self._state = state
        self._columns = columns
        self.history = history
        self.run_id = run_id

    @staticmethod
    @abstractmethod
    def _predictor(state: bytes, columns: Columns) -> Predict:
        """Return a function from the model's inputs to an array for each label. Called on executors."""

    @override
    def _transform(self, dataset: DataFrame) -> DataFrame:
        state, columns, make = self._state, self._columns, self._predictor
        types = {field.name: field.dataType for field in dataset.schema.fields}
        names = list(columns.features)
        added = [StructField(f"{label}__output", ArrayType(DoubleType())) for label in columns.labels]
        vectors = [name for name in names if isinstance(types[name], VectorUDT)]
        # Vectors are no type of Arrow's: they travel beside the row as arrays, and the row keeps its own.
        beside = {name: f"__{name}" for name in vectors}
        plain = dataset.withColumns({beside[name]: vector_to_array(name) for name in vectors}) if vectors else dataset
        kept = [name for name in dataset.columns if name not in vectors]

        def predict(batches: Iterator[Any]) -> Iterator[Any]:
            predictor = make(state, columns)
            for frame in batches:
                arrays = {
                    name: np.stack([np.asarray(value) for value in frame[beside.get(name, name)]]) for name in names
                }
                outputs = predictor(columns.inputs(arrays))
                for field, output in zip(added, outputs, strict=True):
                    frame[field.name] = list(output.astype(np.float64).reshape(len(frame), -1))
                yield frame

        schema = StructType(
            [*(plain.schema[name] for name in plain.columns if name in kept or name in beside.values()), *added]
        )
        chosen = plain.select(*[field.name for field in schema.fields if field.name in plain.columns])
        return chosen.mapInPandas(predict, schema)
