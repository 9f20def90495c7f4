"""`TorchEstimator`: trains a PyTorch model on the rows of a DataFrame."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import cloudpickle
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
from unidist_spark.store import Store

if TYPE_CHECKING:
    import torch

Loss = Callable[..., Any]


@dataclass(frozen=True)
class TorchTraining(RankTraining):
    """Trains a module by a loop."""

    @override
    def run(self) -> Trained:
        import torch

        import unidist.torch as ud

        ud.init()
        ud.seed(self.seed)
        model, optimizer, losses, weights = pickle.loads(self.pickled)
        shapes = [value.shape for value in model.state_dict().values()]
        model, optimizer = ud.distribute(model, optimizer)
        rows, kept = self.rank_rows(ud.data_rank(), ud.data_size())
        trained = self.resume(ud, model, optimizer)
        factor = self.rate_factor(trained, ud.data_size())
        for group in optimizer.param_groups:
            group["lr"] *= factor
        for epoch in range(trained.epochs, self.epochs):
            model.train()
            total = torch.zeros((), dtype=torch.float64)
            for batch in self.batches(rows, epoch):
                optimizer.zero_grad()
                outputs = _outputs(model, self.columns.inputs(batch), self.columns)
                loss = self.loss(outputs, batch, losses, weights)
                loss.backward()
                optimizer.step()
                total += loss.detach().double()
            optimizer.flush()
            trained.widths = [output[0].numel() for output in outputs]
            means = {"loss": total / self.training.count(rows)}
            if kept is not None and self.validation is not None:
                model.eval()
                with torch.no_grad():
                    means["val_loss"] = torch.stack([
                        self.loss(_outputs(model, self.columns.inputs(batch), self.columns), batch, losses, weights)
                        for batch in self.validation.batches(kept)
                    ]).double().mean()  # fmt: skip
            for name, mean in means.items():
                trained.history.setdefault(name, []).append(ud.allreduce(mean, name=name).item())
            trained.epochs = epoch + 1
            whole = model.state_dict()
            self.check_whole(shapes, [value.shape for value in whole.values()])
            self.save(ud, model, optimizer, trained)
            if ud.rank() == 0:
                plain, data = pickle.loads(self.pickled)[0], io.BytesIO()
                plain.load_state_dict(whole)
                torch.save(plain, data, pickle_module=cloudpickle)  # also classes of the driver's script
                self.write_model(data.getvalue())
        ud.barrier()
        return trained

    def loss(
        self, outputs: Sequence[Any], batch: Mapping[str, Array], losses: Sequence[Loss], weights: Sequence[float]
    ) -> Any:
        """Return the loss of a batch: the sum over labels, each with its weight.

        Args:
            outputs: of the model, for each label.
            batch: its columns.
            losses: of output and label, for each label.
            weights: of each label.
        """
        import torch

        of_samples = None if self.columns.weight is None else torch.as_tensor(batch[self.columns.weight])
        total = 0
        targets = self.columns.targets(batch)
        for output, target, loss, weight in zip(outputs, targets, losses, weights, strict=True):
            label = torch.as_tensor(target)
            if label.is_floating_point():
                label = label.to(output.dtype)
            if self.columns.label_shapes is None and label.numel() == output.numel():
                label = label.reshape(output.shape)
            if of_samples is None:
                found = loss(output, label)
            else:
                found = (loss(output, label, reduction="none").flatten() * of_samples.to(output.dtype)).mean()
            total = total + weight * found
        return total


class TorchModel(SparkModel):
    """A trained PyTorch model, see `SparkModel`."""

    @property
    @override
    def model(self) -> torch.nn.Module:
        """A copy of the trained module."""
        found: torch.nn.Module = _load(self._state)
        return found

    @staticmethod
    @override
    def _predictor(state: bytes, columns: Columns) -> Predict:
        import torch

        model = _load(state).eval()

        def predict(inputs: list[Array]) -> list[Array]:
            with torch.no_grad():
                return [output.double().numpy() for output in _outputs(model, inputs, columns)]

        return predict


class TorchEstimator(SparkEstimator):
    """Trains a model on `num_proc` ranks; the arguments are those of Horovod's class.

        model = TorchEstimator(
            model=net, optimizer=optimizer, loss=torch.nn.functional.mse_loss, feature_cols=["x"], label_cols=["y"],
            store=Store.create("/shared"), num_proc=2, batch_size=32, epochs=5,
        ).fit(rows)
        model.transform(rows)  # with a column y__output

    The rows are written as Parquet into the store, and each rank reads its own row groups. After each epoch the
    store has the model, and what a later `fit` with the same `run_id` needs to go on, on any number of ranks.

    Arguments can be left out, and set by `setBatchSize(...)` and so on before `fit`, which raises a ConfigurationError
    if they do not go together.

    Args:
        model: a module; called with the feature columns, in their order.
        optimizer: of its parameters.
        loss: of output and label, for each label column; one function is for all of them.
        loss_weights: of each label's loss in their sum; default: equal ones with the sum 1.
        feature_cols: numbers, lists of numbers, or vectors of Spark's ML.
        label_cols: as `feature_cols`; with several the model returns as many outputs.
        sample_weight_col: column of a weight for each row; `loss` then takes `reduction="none"`, as PyTorch's do.
        store: for rows and checkpoints; all executors reach it.
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
        input_shapes: of each feature with the rows, (-1, 8, 8); None: (-1, n) for lists and vectors, (-1, 1) for
            numbers.
        label_shapes: as `input_shapes`; None: that of the output, if it has as many numbers.
        shuffle: each epoch has another order of each rank's rows.
        random_seed: of the order, and of dropout.
        inmemory_cache_all: each rank reads its rows once, and keeps them.
        partitions_per_process: Parquet files for each rank.
        run_id: name of the run in the store; one that is there already is resumed, up to `epochs` in all. Default: a
            random one.
        strategy: as `--strategy`; one that keeps the model whole on each rank.
        engine: as `--engine`.
        env: variables of every rank.
        backend_env: Horovod's name of `env`.
        verbose: 0: nothing is said.
        others: arguments of Horovod's that cannot be followed. `fit` refuses all values but those that say nothing.

    Raises:
        TypeError: there is no such argument.
    """

    training = TorchTraining
    trained_model = TorchModel
    not_followed: ClassVar[Mapping[str, tuple[Any, str]]] = {
        **SparkEstimator.not_followed,
        "callbacks": ([], "the loop has none; use history of the model, or train by unidist.spark.run"),
        "loss_constructors": (None, "give functions as loss"),
        "metrics": ([], "compute them from the columns of transform"),
        "train_minibatch_fn": (None, "train by unidist.spark.run, with a loop of your own"),
    }

    @keeps_arguments
    def __init__(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Loss | Sequence[Loss] | None = None,
        loss_weights: Sequence[float] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        store: Store | None = None,
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
        labels, loss = list(values["label_cols"]), values["loss"]
        losses = [loss] * len(labels) if callable(loss) else list(loss)
        if len(losses) != len(labels):
            raise ConfigurationError(f"{len(losses)} losses for label_cols={labels}: give one, or one for each label.")
        weights = values["loss_weights"] or [1 / len(labels)] * len(labels)
        return cloudpickle.dumps((values["model"], values["optimizer"], losses, list(weights)))

    @override
    def _compression(self, given: Any) -> str:
        from unidist.torch import Compression

        return compressor_name(given, Compression)

    @override
    def _to_bytes(self) -> bytes:
        return cloudpickle.dumps(self.given())

    @classmethod
    @override
    def _of_bytes(cls, state: bytes) -> Self:
        return cls(**pickle.loads(state))


def _outputs(model: Any, inputs: Sequence[Array], columns: Columns) -> list[Any]:
    """Return an output of the model for each label."""
    import torch

    dtype = next((value.dtype for value in model.parameters()), torch.get_default_dtype())
    tensors = [torch.as_tensor(each) for each in inputs]
    found = model(*[each.to(dtype) if each.is_floating_point() else each for each in tensors])
    return list(found) if len(columns.labels) > 1 else [found]


def _load(state: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(state), weights_only=False)
