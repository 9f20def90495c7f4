"""`TorchEstimator`: trains a PyTorch model on the rows of a DataFrame."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_spark.estimators.base import Array, Columns, History, Predict, RankTraining, SparkEstimator, SparkModel
from unidist_spark.store import Store

if TYPE_CHECKING:
    import torch

Loss = Callable[[Any, Any], Any]


class TorchEstimator(SparkEstimator):
    """Trains a model on `num_proc` ranks; the arguments are those of Horovod's class.

        model = TorchEstimator(
            model=net, optimizer=optimizer, loss=torch.nn.functional.mse_loss, feature_cols=["x"], label_cols=["y"],
            store=Store.create("/shared"), num_proc=2, batch_size=32, epochs=5,
        ).fit(rows)
        model.transform(rows)  # with a column y__output

    The rows are written as Parquet into the store, and each rank reads its own row groups. After each epoch the
    store has the model, and what a later `fit` with the same `run_id` needs to go on, on any number of ranks.

    Args:
        model: a module; called with the feature columns, in their order.
        optimizer: of its parameters.
        loss: of output and label, for each label column; one function is for all of them.
        feature_cols: numbers, lists of numbers, or vectors of Spark's ML.
        label_cols: as `feature_cols`; with several the model returns as many outputs.
        store: for rows and checkpoints; all executors reach it.
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
        strategy: as `--strategy`; one that keeps the model whole on each rank.
        engine: as `--engine`.
        env: variables of every rank.
        verbose: 0: nothing is said.

    Raises:
        ConfigurationError: arguments that do not go together.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | Sequence[Loss],
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: Store,
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
        losses = [loss] * len(label_cols) if callable(loss) else list(loss)
        if len(losses) != len(label_cols):
            raise ConfigurationError(
                f"{len(losses)} losses for label_cols={list(label_cols)}: give one, or one for each label."
            )
        super().__init__(
            _TorchTraining,
            TorchModel,
            cloudpickle.dumps((model, optimizer, losses)),
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


class TorchModel(SparkModel):
    """A trained PyTorch model, see `SparkModel`."""

    @property
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


@dataclass(frozen=True)
class _TorchTraining(RankTraining):
    """Trains a module by a loop."""

    @override
    def run(self) -> History:
        import torch

        import unidist.torch as ud

        ud.init()
        ud.seed(self.seed)
        model, optimizer, losses = pickle.loads(self.pickled)
        shapes = [value.shape for value in model.state_dict().values()]
        model, optimizer = ud.distribute(model, optimizer)
        rows, kept = self.rank_rows(ud.data_rank(), ud.data_size())
        done, history = self.resume(ud, model, optimizer)
        for epoch in range(done, self.epochs):
            model.train()
            total = torch.zeros((), dtype=torch.float64)
            for batch in self.batches(rows, epoch):
                optimizer.zero_grad()
                loss = self._loss(model, losses, batch)
                loss.backward()
                optimizer.step()
                total += loss.detach().double()
            optimizer.flush()
            means = {"loss": total / rows.num_batches(self.batch_size)}
            if kept is not None:
                model.eval()
                with torch.no_grad():
                    batches = kept.batches(self.batch_size, shuffle_seed=None)
                    means["val_loss"] = torch.stack(
                        [self._loss(model, losses, batch) for batch in batches]
                    ).double().mean()  # fmt: skip
            for name, mean in means.items():
                history.setdefault(name, []).append(ud.allreduce(mean, name=name).item())
            whole = model.state_dict()
            self.check_whole(shapes, [value.shape for value in whole.values()])
            self.save(ud, model, optimizer, epoch + 1, history)
            if ud.rank() == 0:
                plain, data = pickle.loads(self.pickled)[0], io.BytesIO()
                plain.load_state_dict(whole)
                torch.save(plain, data)
                self.write_model(data.getvalue())
        ud.barrier()
        return history

    def _loss(self, model: Any, losses: Sequence[Loss], batch: Mapping[str, Array]) -> Any:
        import torch

        total = 0
        outputs = _outputs(model, self.columns.inputs(batch), self.columns)
        for name, output, loss in zip(self.columns.labels, outputs, losses, strict=True):
            label = torch.as_tensor(batch[name])
            if label.is_floating_point():
                label = label.to(output.dtype).reshape(output.shape)
            total = total + loss(output, label)
        return total


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
