"""Code shared by the estimators of all frameworks: arguments, rows, checkpoints, predictions."""

from __future__ import annotations

import pickle
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias

import cloudpickle
import numpy as np
from pyspark.ml import Estimator, Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param import Param, Params
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it
from pyspark.sql.types import ArrayType, DoubleType, NumericType, StructField, StructType
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_spark.backend import Backend, SparkBackend
from unidist_spark.estimators.parameters import Parameters, Saved
from unidist_spark.row_groups import RankRows
from unidist_spark.store import Store

Array: TypeAlias = "np.ndarray[Any, Any]"
History: TypeAlias = dict[str, list[float]]
Predict: TypeAlias = Callable[[list[Array]], list[Array]]

_VALIDATION_SEED = 0
_COUNTS = (
    "batch_size", "val_batch_size", "epochs", "train_steps_per_epoch", "validation_steps_per_epoch",
    "backward_passes_per_step", "partitions_per_process",
)  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """Which columns go into the model, and in which shape.

    Args:
        features: names, in the order of the model's inputs.
        labels: names, in the order of the model's outputs.
        shapes: of each feature; None: (-1, n) for lists and vectors, (-1, 1) for numbers.
        label_shapes: of each label; None: as they are.
        weight: name of the column with the weights of samples; None: all count the same.
    """

    features: tuple[str, ...]
    labels: tuple[str, ...]
    shapes: Sequence[Sequence[int]] | None = None
    label_shapes: Sequence[Sequence[int]] | None = None
    weight: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All columns."""
        return (*self.features, *self.labels, *([self.weight] if self.weight else []))

    def inputs(self, batch: Mapping[str, Array]) -> list[Array]:
        """Return the model's inputs."""
        arrays = [batch[name] for name in self.features]
        shapes = self.shapes or [(len(array), -1) for array in arrays]
        return [array.reshape(tuple(shape)) for array, shape in zip(arrays, shapes, strict=True)]

    def targets(self, batch: Mapping[str, Array]) -> list[Array]:
        """Return the labels."""
        arrays = [batch[name] for name in self.labels]
        shapes = self.label_shapes or [array.shape for array in arrays]
        return [array.reshape(tuple(shape)) for array, shape in zip(arrays, shapes, strict=True)]


@dataclass(frozen=True)
class Reading:
    """How a rank passes over its rows.

    Args:
        batch_size: rows of each batch.
        num_batches: of each pass; None: as many as it takes.
    """

    batch_size: int
    num_batches: int | None

    def count(self, rows: RankRows) -> int:
        """Return the number of batches of a pass."""
        return self.num_batches or rows.num_batches(self.batch_size)

    def batches(self, rows: RankRows, *, shuffle_seed: int | None = None) -> Iterator[dict[str, Array]]:
        """Return the batches of a pass."""
        return rows.batches(self.batch_size, shuffle_seed=shuffle_seed, num_batches=self.num_batches)


@dataclass
class Trained:
    """What a run has found so far; its checkpoints have it as well.

    Args:
        epochs: complete ones.
        history: losses and metrics of each epoch.
        widths: how many numbers the model returns for each row, by label.
        rate: by what the learning rate has been multiplied.
    """

    epochs: int = 0
    history: History = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    rate: int = 1


@dataclass(frozen=True)
class RankTraining(ABC):
    """A training as every rank runs it; Spark carries it there.

    Args:
        pickled: model, optimizer and whatever else comes from the user.
        columns: of the rows.
        training: how rows are passed over.
        validation: as `training`, of the rows for validation; None: there are none.
        epochs: number of passes over the rows.
        shuffle: each epoch has another order of each rank's rows.
        seed: of the order, and of dropout.
        scales_rate: the learning rate is multiplied by the number of ranks.
        keeps_rows: rows are read once, and stay in memory.
        store: for rows and checkpoints.
        data_id: of the rows in the store; None: they have no id.
        run_id: name of the run in the store.
        is_resumed: the run goes on from its last complete epoch.
    """

    pickled: bytes
    columns: Columns
    training: Reading
    validation: Reading | None
    epochs: int
    shuffle: bool
    seed: int
    scales_rate: bool
    keeps_rows: bool
    store: Store
    data_id: str | None
    run_id: str
    is_resumed: bool

    @abstractmethod
    def run(self) -> Trained:
        """Train on this rank and return what was found, the same on every rank."""

    def rank_rows(self, rank: int, num_ranks: int) -> tuple[RankRows, RankRows | None]:
        """Return a rank's rows for training, and those for validation if there are any."""
        place: dict[str, Any] = {
            "rank": rank,
            "num_ranks": num_ranks,
            "columns": self.columns.names,
            "keep": self.keeps_rows,
        }
        rows = RankRows(self.store.get_train_data_path(self.data_id), **place)
        kept = RankRows(self.store.get_val_data_path(self.data_id), **place) if self.validation else None
        return rows, kept

    def batches(self, rows: RankRows, epoch: int) -> Iterator[dict[str, Array]]:
        """Return the batches of an epoch of training."""
        seed = self.seed * 1_000_003 + epoch if self.shuffle else None
        return self.training.batches(rows, shuffle_seed=seed)

    def resume(self, ud: Any, model: Any, optimizer: Any) -> Trained:
        """Load the last complete epoch of a run that is resumed. Collective.

        Args:
            ud: the facade of the framework.
            model: of `distribute`.
            optimizer: of `distribute`.

        Returns:
            What the run has found until then.
        """
        if not self.is_resumed:
            return Trained()
        loaded = ud.load(self.store.get_state_path(self.run_id), model, optimizer)
        history = {name: list(values) for name, values in loaded.extra["history"].items()}
        widths = loaded.extra.get("widths", [0] * len(self.columns.labels))  # 0.1.0 did not store what follows
        return Trained(int(loaded.step or 0), history, list(widths), loaded.extra.get("rate", 1))

    def rate_factor(self, trained: Trained, num_ranks: int) -> float:
        """Return by what to multiply the learning rate, which may have been multiplied for other ranks before."""
        if not self.scales_rate:
            return 1.0
        factor, trained.rate = num_ranks / trained.rate, num_ranks
        return factor

    def save(self, ud: Any, model: Any, optimizer: Any, trained: Trained) -> None:
        """Save for `resume`, in a store that is a folder. Collective, with the same arguments."""
        state = self.store.get_state_path(self.run_id)
        if state:
            extra = {"history": trained.history, "widths": trained.widths, "rate": trained.rate}
            ud.save(state, model, optimizer, step=trained.epochs, keep=1, extra=extra)

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


class SparkEstimator(Parameters, Saved, Estimator[Any]):
    """Trains a model on `num_proc` ranks. Arguments: see the subclasses."""

    training: ClassVar[type[RankTraining]]
    trained_model: ClassVar[type[SparkModel]]
    scales_learning_rate: ClassVar[bool] = False

    not_followed: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "categorical_cols": (None, "feature_cols names all columns; leave it out"),
        "compress_sparse_cols": (False, "vectors are written whole, by Parquet's own compression; leave it out"),
        "continuous_cols": (None, "feature_cols names all columns; leave it out"),
        "data_module": (None, "each rank reads row groups of the store itself; leave it out"),
        "mp_start_method": (None, "reading needs no processes; leave it out"),
        "reader_pool_type": ("thread", "each rank reads its row groups itself; leave it out"),
        "shuffle_buffer_size": (None, "a rank shuffles all its rows; use shuffle"),
        "tensorflow_dataset_prefetch_buffer_size": (0, "a rank's rows are in memory; leave it out"),
        "train_reader_num_workers": (2, "each rank reads its row groups itself; leave it out"),
        "transformation_edit_fields": (None, "transform the DataFrame before fit"),
        "transformation_fn": (None, "transform the DataFrame before fit"),
        "transformation_removed_fields": (None, "only feature_cols and label_cols are read"),
        "use_gpu": (False, "estimators train on CPUs; for GPUs train by unidist.spark.run"),
        "val_reader_num_workers": (2, "each rank reads its row groups itself; leave it out"),
    }

    @abstractmethod
    def _pickled(self, values: Mapping[str, Any]) -> bytes:
        """Return what ranks need of the user's objects.

        Raises:
            ConfigurationError: they do not go together.
        """

    def _input_shapes(self, model: Any) -> Sequence[Sequence[int]] | None:
        """Return the shapes of the features that the model says."""
        return None

    @abstractmethod
    def _compression(self, given: Any) -> str:
        """Return the name of a compressor."""

    def fit_on_parquet(self, params: Any = None, dataset_idx: Any = None) -> Any:
        """Train on rows that are in the store already, at `get_train_data_path(dataset_idx)`.

        Those at `get_val_data_path(dataset_idx)` are for validation, if there are any. Columns are numbers or lists.

        Args:
            params: a map of parameters, instead of those that are set.
            dataset_idx: as the store's methods take it.

        Returns:
            The model, as `fit` does.
        """
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        values, columns = self._checked()
        store, data_id = values["store"], None if dataset_idx is None else str(dataset_idx)
        schema = SparkSession.active().read.parquet(store.get_train_data_path(data_id)).schema
        _check_columns(columns, schema)
        vectors = [name for name in columns.names if isinstance(schema[name].dataType, VectorUDT)]
        if vectors:
            raise ConfigurationError(f"the Parquet files have vectors in {vectors}: write them by vector_to_array.")
        return self._train(values, columns, schema, data_id, store.exists(store.get_val_data_path(data_id)))

    @override
    def _fit(self, dataset: DataFrame) -> SparkModel:
        values, columns = self._checked()
        _check_columns(columns, dataset.schema)
        store, run_id = values["store"], values["run_id"]
        rows, kept = _divided(dataset, values["validation"])
        num_files = values["backend"].num_processes() * values["partitions_per_process"]
        _write(rows, columns, store.get_train_data_path(run_id), num_files)
        if kept is not None:
            _write(kept, columns, store.get_val_data_path(run_id), num_files)
        return self._train(values, columns, dataset.schema, run_id, kept is not None)

    def _checked(self) -> tuple[dict[str, Any], Columns]:
        """Return all arguments, with what is made of them for a run."""
        values = self.values()
        missing = [name for name in ("model", "optimizer", "loss", "store") if values[name] is None]
        if missing:
            raise ConfigurationError(f"{type(self).__name__} needs {', '.join(missing)}.")
        features, labels = tuple(values["feature_cols"] or ()), tuple(values["label_cols"] or ())
        if not labels or not features:
            raise ConfigurationError(
                f"label_cols={list(labels)}, feature_cols={list(features)}: give at least one of each."
            )
        for name, of in (("input_shapes", features), ("label_shapes", labels), ("loss_weights", labels)):
            if values[name] is not None and len(values[name]) != len(of):
                raise ConfigurationError(f"{len(values[name])} {name} for the columns {list(of)}.")
        validation = values["validation"]
        if isinstance(validation, float) and not 0 <= validation < 1:
            raise ConfigurationError(f"validation={validation}: a share of the rows is at least 0 and below 1.")
        for name in _COUNTS:
            if values[name] is not None and values[name] < 1:
                raise ConfigurationError(f"{name}={values[name]}: give at least 1.")
        values["pickled"] = self._pickled(values)
        values["env"] = self._variables(values)
        values["backend"] = _backend(values)
        values["run_id"] = values["run_id"] or f"run-{uuid.uuid4().hex[:12]}"
        shapes = values["input_shapes"] or self._input_shapes(values["model"])
        return values, Columns(features, labels, shapes, values["label_shapes"], values["sample_weight_col"])

    def _train(
        self, values: Mapping[str, Any], columns: Columns, schema: StructType, data_id: str | None, has_kept: bool
    ) -> SparkModel:
        batch_size, store, run_id = values["batch_size"], values["store"], values["run_id"]
        kept = Reading(values["val_batch_size"] or batch_size, values["validation_steps_per_epoch"])
        training = self.training(
            pickled=values["pickled"],
            columns=columns,
            training=Reading(batch_size, values["train_steps_per_epoch"]),
            validation=kept if has_kept else None,
            epochs=values["epochs"],
            shuffle=values["shuffle"],
            seed=values["random_seed"] or 0,
            scales_rate=self.scales_learning_rate,
            keeps_rows=values["inmemory_cache_all"],
            store=store,
            data_id=data_id,
            run_id=run_id,
            is_resumed=store.has_state(run_id),
        )
        found: Trained = values["backend"].run(training.run, env=values["env"])[0]
        state = store.read(store.get_checkpoint_path(run_id))
        numbers = [isinstance(schema[name].dataType, NumericType) for name in columns.labels]
        return self.trained_model(state, columns, found, run_id, numbers)

    def _variables(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of every rank."""
        strategies = [values["strategy"]] if values["strategy"] else []
        if values["backward_passes_per_step"] > 1:
            strategies.append(f"accumulate={values['backward_passes_per_step']}")
        if values["gradient_compression"] is not None:
            strategies.append(f"data:compression={self._compression(values['gradient_compression'])}")
        chosen = {"UNIDIST_STRATEGY": ",".join(strategies) or None, "UNIDIST_ENGINE": values["engine"]}
        return {
            **{name: value for name, value in chosen.items() if value is not None},
            **(values["env"] or {}),
            **(values["backend_env"] or {}),
        }


def _backend(values: Mapping[str, Any]) -> Backend:
    given: Backend | None = values["backend"]
    if given is None:
        return SparkBackend(values["num_proc"], verbose=values["verbose"])
    if values["num_proc"] is not None:
        raise ConfigurationError(f"backend and num_proc={values['num_proc']}: the backend has a number; give one.")
    return given


def compressor_name(given: Any, known: type) -> str:
    """Return the name of a compressor.

    Args:
        given: a name with its options, or one of `known`.
        known: the class `Compression` of a framework.

    Raises:
        ConfigurationError: it is neither.
    """
    names = {id(each): name for name, each in vars(known).items()}
    found = given if isinstance(given, str) else names.get(id(given))
    if not found:
        raise ConfigurationError(f"gradient_compression={given!r}: give a name, or Compression.none, fp16 or bf16.")
    return found


def _check_columns(columns: Columns, schema: StructType) -> None:
    missing = [name for name in columns.names if name not in schema.names]
    if missing:
        raise ConfigurationError(f"the DataFrame has no columns {missing}; it has {schema.names}.")


def _divided(dataset: DataFrame, validation: float | str | None) -> tuple[DataFrame, DataFrame | None]:
    if not validation:
        return dataset, None
    if isinstance(validation, str):
        column = F.col(validation).cast("boolean")
        return dataset.filter(~column), dataset.filter(column)
    rows, kept = dataset.randomSplit([1 - validation, validation], seed=_VALIDATION_SEED)
    return rows, kept


def _plain(name: str, schema: StructType) -> Column:
    """Return a column as numbers or lists: vectors are no type of Arrow's or Parquet's."""
    return vector_to_array(name) if isinstance(schema[name].dataType, VectorUDT) else F.col(name)


def _write(rows: DataFrame, columns: Columns, path: str, num_files: int) -> None:
    chosen = [_plain(name, rows.schema).alias(name) for name in columns.names]
    rows.select(*chosen).repartition(num_files).write.mode("overwrite").parquet(path)


class SparkModel(Saved, Model):
    """A trained model: adds an output column for each label, named `LABEL__output` or as `setOutputCols` says.

    It has a number for each row if the label is a number and the model returns one, else an array of numbers.

    Args:
        state: what `RankTraining.write_model` got.
        columns: that it was trained on.
        found: losses and metrics of each epoch, and how many numbers the model returns.
        run_id: name of the run in the store.
        numbers: which labels are numbers.
    """

    outputCols: Param[list[str]] = Param(Params._dummy(), "outputCols", "names of the output columns")  # noqa: N815

    def __init__(self, state: bytes, columns: Columns, found: Trained, run_id: str, numbers: Sequence[bool]) -> None:
        super().__init__()
        self._state = state
        self._columns = columns
        self._found = found
        self._numbers = list(numbers)
        self.run_id = run_id
        self._setDefault(outputCols=[f"{label}__output" for label in columns.labels])

    @property
    def history(self) -> History:
        """Losses and metrics of each epoch: `{"loss": [...], "val_loss": [...]}`."""
        return self._found.history

    @property
    @abstractmethod
    def model(self) -> Any:
        """A copy of the trained model."""

    def setOutputCols(self, value: Sequence[str]) -> Self:  # noqa: N802 - Horovod's name, as those below
        """Set the names of the output columns, one for each label.

        Raises:
            ConfigurationError: another number of names.
        """
        if isinstance(value, str) or len(value) != len(self._columns.labels):
            raise ConfigurationError(f"setOutputCols({value!r}): give a name for each of {list(self._columns.labels)}.")
        return self._set(outputCols=list(value))

    def getOutputCols(self) -> list[str]:  # noqa: N802
        """Return the names of the output columns."""
        return self.getOrDefault(self.outputCols)

    def getHistory(self) -> History:  # noqa: N802
        """Return `history`."""
        return self.history

    def getModel(self) -> Any:  # noqa: N802
        """Return `model`."""
        return self.model

    def getRunId(self) -> str:  # noqa: N802
        """Return `run_id`."""
        return self.run_id

    def getFeatureColumns(self) -> list[str]:  # noqa: N802
        """Return the names of the columns that go into the model."""
        return list(self._columns.features)

    def getLabelColumns(self) -> list[str]:  # noqa: N802
        """Return the names of the labels."""
        return list(self._columns.labels)

    @staticmethod
    @abstractmethod
    def _predictor(state: bytes, columns: Columns) -> Predict:
        """Return a function from the model's inputs to an array for each label. Called on executors."""

    @override
    def _to_bytes(self) -> bytes:
        outputs = self.getOutputCols()
        return cloudpickle.dumps((self._state, self._columns, self._found, self.run_id, self._numbers, outputs))

    @classmethod
    @override
    def _of_bytes(cls, state: bytes) -> Self:
        *given, outputs = pickle.loads(state)
        return cls(*given).setOutputCols(outputs)

    @override
    def _transform(self, dataset: DataFrame) -> DataFrame:
        import pandas as pd

        _check_columns(Columns(self._columns.features, ()), dataset.schema)
        state, columns, make = self._state, self._columns, self._predictor
        widths = self._found.widths
        is_one = [number and width == 1 for number, width in zip(self._numbers, widths, strict=True)]
        places = [f"output{place}" for place in range(len(is_one))]
        kinds = [DoubleType() if one else ArrayType(DoubleType()) for one in is_one]

        def predict(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
            predictor = make(state, columns)
            for frame in batches:
                arrays = {name: np.stack([np.asarray(value) for value in frame[name]]) for name in columns.features}
                found = {}
                for place, one, output in zip(places, is_one, predictor(columns.inputs(arrays)), strict=True):
                    rows = output.astype(np.float64).reshape(len(frame), -1)
                    found[place] = rows[:, 0] if one else list(rows)
                yield pd.DataFrame(found)

        predict.__annotations__ = {"batches": Iterator[pd.DataFrame], "return": Iterator[pd.DataFrame]}
        fields = StructType([StructField(place, kind) for place, kind in zip(places, kinds, strict=True)])
        # The result of one call has all outputs, which Spark must not compute again for each of them.
        outputs = F.pandas_udf(predict, fields).asNondeterministic()
        beside = f"__{uuid.uuid4().hex}"
        inputs = F.struct(*[_plain(name, dataset.schema).alias(name) for name in columns.features])
        called = dataset.withColumn(beside, outputs(inputs))
        named = zip(self.getOutputCols(), places, strict=True)
        return called.withColumns({name: F.col(f"{beside}.{place}") for name, place in named}).drop(beside)
