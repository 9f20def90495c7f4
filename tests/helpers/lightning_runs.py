"""Trains small LightningModules in this process, on a rank or alone, and returns what came out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any
from unittest import mock

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, FEATURES = 60, 8


def samples(kind: str = "regression") -> TensorDataset:
    """Return the same data in every process."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    if kind == "classes":
        return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long())
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + inputs[:, :1] ** 2)


def network(*, norm: bool = False) -> torch.nn.Sequential:
    """Return a small network; with a batch normalisation in it, if asked for."""
    middle = [torch.nn.BatchNorm1d(16)] if norm else []
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), *middle, torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.GELU(),
        torch.nn.Linear(16, 1),
    )  # fmt: skip


class Regression(lightning.LightningModule):
    """A network, and a parameter that is the module's own.

    Args:
        norm: the network has a batch normalisation.
        lr: learning rate.
    """

    def __init__(self, *, norm: bool = False, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = network(norm=norm)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.rates: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs) * self.scale

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", torch.nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


class Counting(Regression):
    """Its loss is a mean over some of the samples, of which each batch has another number."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        import unidist.torch as ud

        inputs, targets = batch
        counts = targets[:, 0] > 0.5
        losses = torch.nn.functional.mse_loss(self(inputs), targets, reduction="none")[:, 0]
        loss = losses[counts].sum() / counts.sum().clamp(min=1)
        return ud.weighted(loss, counts.sum()) if self.weighs and ud.is_initialized() else loss

    weighs = True


class Unweighted(Counting):
    """The same, as if each batch counted as much."""

    weighs = False


class TwoOptimizers(lightning.LightningModule):
    """Two networks that train each other, by turns, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = network(), network()

    def training_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        one, other = self.optimizers()
        with one.toggle_model():
            loss = torch.nn.functional.mse_loss(self.first(inputs) + self.second(inputs), targets)
            one.zero_grad()
            self.manual_backward(loss)
            one.step()
        loss = torch.nn.functional.mse_loss(self.second(inputs), self.first(inputs).detach())
        other.zero_grad()
        self.manual_backward(loss)
        other.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.first.parameters(), lr=1e-2), torch.optim.SGD(self.second.parameters(), lr=1e-2)]


class Classifier(lightning.LightningModule):
    """Logs metrics of torchmetrics, which count samples themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(FEATURES, 3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.collected = torchmetrics.MetricCollection([torchmetrics.AUROC("multiclass", num_classes=3)])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.collected.update(logits.softmax(1), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.collected.compute())
        self.collected.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Bound(Regression):
    """Distributes itself, as scripts did before there was a strategy."""

    def configure_optimizers(self) -> Any:
        import unidist.torch as ud

        return ud.distribute(self, torch.optim.AdamW(self.parameters()))[1]


class Wrapped(Regression):
    """Has a network that a wrapper of PyTorch's distributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.DataParallel(self.net)


MODULES: dict[str, type[lightning.LightningModule]] = {
    "counting": Counting,
    "unweighted": Unweighted,
    "bound": Bound,
    "wrapped": Wrapped,
    "regression": Regression,
    "two": TwoOptimizers,
    "classes": Classifier,
}


class _Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.found.append(float(outputs["loss"]) if outputs else 0.0)


def train(
    batch_size: int,
    *,
    kind: str = "regression",
    strategy: Any = "auto",
    line: str | None = None,
    dtype: str = "float64",
    module: Mapping[str, Any] | None = None,
    validate: bool = False,
    patience: int = 0,
    folder: str | None = None,
    ckpt_path: str | None = None,
    fits: int = 1,
    **options: Any,
) -> dict[str, Any] | str:
    """Fit a module, and return its state and what was logged; the text of a unidist error.

    Args:
        batch_size: of this process.
        kind: which module.
        strategy: of the Trainer. "auto": this process alone, with the samples in the order of one of several ranks;
            "ddp": over gloo, with LOCAL_RANK, MASTER_PORT and the number of `devices` set.
        line: the strategy line of `UnidistStrategy`.
        dtype: torch's default type.
        module: arguments of the module.
        validate: after each epoch.
        patience: of early stopping, on the validation's loss; 0: none.
        folder: where `ModelCheckpoint` puts its files; None: there are none.
        ckpt_path: to resume from.
        fits: how often to call `fit`.
        options: of the Trainer.
    """
    from unidist.errors import UnidistError

    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return _train(
            batch_size, kind, strategy, line, module or {}, validate, patience, folder, ckpt_path, fits, options
        )
    except UnidistError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        torch.set_default_dtype(torch.float32)
        _end()


def _train(
    batch_size: int,
    kind: str,
    strategy: Any,
    line: str | None,
    arguments: Mapping[str, Any],
    validate: bool,
    patience: int,
    folder: str | None,
    ckpt_path: str | None,
    fits: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    if line is not None:
        from unidist_lightning import UnidistStrategy

        strategy = UnidistStrategy(line)
    torch.manual_seed(0)
    model = MODULES[kind](**arguments)
    data = samples(kind)
    losses = _Losses()
    callbacks: list[Callback] = [losses]
    if patience:
        callbacks.append(EarlyStopping("val", patience=patience, min_delta=0.05))
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_last=True, save_top_k=-1))
    sampler = DistributedSampler(data, 1, 0) if strategy == "auto" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and intervals of logging
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy=strategy,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=folder is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"max_epochs": 2, "num_sanity_val_steps": 0, **options},
        )
        for number in range(fits):
            if number:
                trainer.fit_loop.max_epochs += 1
            trainer.fit(
                model,
                DataLoader(data, batch_size, sampler=sampler),
                DataLoader(data, batch_size) if validate else None,
                ckpt_path=ckpt_path,
            )
        from unidist_torch.models import plain_part

        state = {name: plain_part(value).clone() for name, value in model.state_dict().items()}  # is pickled
        predicted = trainer.predict(model, DataLoader(data, batch_size)) if kind == "regression" else []
    return {
        "state": state,
        "losses": losses.found,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "world_size": trainer.world_size,
        "rates": getattr(model, "rates", []),
        "predicted": torch.cat(predicted) if predicted else torch.empty(0),
        "class": type(model).__name__,
        "layers": {type(each).__name__ for each in model.modules()},
        "is_initialized": torch.distributed.is_initialized(),
    }


def train_on_rank(
    batch_size: int, line: str | None = None, ours: str | None = None, **options: Any
) -> dict[str, Any] | str:
    """Call `train` on a rank.

    Args:
        batch_size: of this rank.
        line: the strategy line on the command line.
        ours: the one of `UnidistStrategy`; None: the strategy is asked for by its name.
        options: of `train`.
    """
    from unidist.settings.environment import set_variables

    with mock.patch.dict(os.environ), set_variables({"UNIDIST_STRATEGY": line} if line else {}):
        return train(batch_size, strategy="unidist", line=ours, **options)


def train_by_ddp(batch_size: int, rank: int, num_ranks: int, port: int, **options: Any) -> dict[str, Any] | str:
    """Call `train` on a rank with Lightning's own DDP over gloo."""
    place = {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    with mock.patch.dict(os.environ, place):
        for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
        return train(batch_size, strategy="ddp", devices=num_ranks, **options)


def _end() -> None:
    import unidist.torch as ud

    ud.shutdown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference between two states of the same names."""
    assert one.keys() == other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())
