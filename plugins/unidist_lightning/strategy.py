"""The strategy of `lightning.Trainer`: the loop is Lightning's, the exchange and the optimizer's step are unidist's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

import unidist.torch as ud
from unidist.errors import ConfigurationError
from unidist.optim.update import update_of
from unidist.runtime import context
from unidist.strategy import StrategyLike
from unidist_lightning.versions import check_version

check_version()  # before the imports below fail in other ways

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment  # noqa: E402
from lightning.pytorch.core.optimizer import _MockOptimizer  # noqa: E402
from lightning.pytorch.plugins import Precision, TorchSyncBatchNorm  # noqa: E402
from lightning.pytorch.strategies import ParallelStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

from unidist_lightning.batch_norm import UnidistSyncBatchNorm  # noqa: E402
from unidist_lightning.clipping import clip_distributed  # noqa: E402
from unidist_lightning.elastic import ElasticTraining  # noqa: E402
from unidist_lightning.environment import UnidistEnvironment  # noqa: E402
from unidist_lightning.method_calls import call_method, call_methods  # noqa: E402
from unidist_lightning.ranks import Ranks, refuse_bound  # noqa: E402
from unidist_lightning.update_states import load_updates, make_equal, updates_of  # noqa: E402
from unidist_torch.training import sync_metrics  # noqa: E402

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator


_OPTIMIZERS = "_unidist_optimizers"
"""The attribute by which a module knows the optimizers that were distributed with it, without keeping them."""


class UnidistStrategy(Ranks, ParallelStrategy):
    """Trains a LightningModule on the ranks of a unidist job: `Trainer(strategy="unidist")`.

        trainer = lightning.Trainer(strategy=UnidistStrategy("zero=2,clip_norm=1"))

    `DistributedDataParallel` is not used, and torch.distributed is not initialized. The learning rate stays what the
    script says, whatever the number of ranks.

    Args:
        strategy: a strategy line, strategy objects, or a list of both; default: the command line's
            (`unidist launch --strategy`), else plain data parallelism.
        accelerator: see Lightning's `ParallelStrategy`, also for the rest.
        parallel_devices: the devices of this host; rank N of the host takes the N-th.
        cluster_environment: a `UnidistEnvironment`, or None.
        checkpoint_io: reads and writes the checkpoint files.
        precision_plugin: of the passes; strategies of the line (`precision=bf16`) come on top.
        commit_every: in an elastic job (`unidist launch --min-np`), updates from one commit to the next. A commit costs
            a copy of model and optimizer; with fewer of them more is repeated when a rank is lost.
    """

    strategy_name = "unidist"
    optimizers: Any
    _layer_sync: Any

    def __init__(
        self,
        strategy: StrategyLike = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        commit_every: int = 1,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment or UnidistEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._line = strategy
        self._is_distributed = False
        self._commit_every = commit_every
        self._elastic: Any = None  # ElasticTraining, in an elastic job

    @property
    def is_distributed(self) -> bool:
        """Lightning injects its DistributedSampler, and synchronizes what is logged with `sync_dist`."""
        return True

    def set_world_ranks(self) -> None:
        """Start unidist; Lightning calls it when a Trainer is made. Collective."""
        self.join_job()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.check_settings()

    @property
    @override
    def precision_plugin(self) -> Precision:
        return clip_distributed(super().precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin if precision_plugin is not None else Precision()

    # The model and its optimizers

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None, "the Trainer sets it"
        assert self.lightning_module is not None, "`connect` sets it"
        module = self.lightning_module
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._layer_sync = UnidistSyncBatchNorm()
        if is_fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        sync_metrics(module)
        if is_fitting:
            self.setup_optimizers(trainer)
        elif not self._is_distributed:
            ud.broadcast_parameters(module.state_dict(), root_rank=0)
        self.setup_precision_plugin()
        self._refuse_two_windows(trainer)
        if is_fitting and context.current().is_elastic and self._elastic is None:
            self._elastic = ElasticTraining(trainer, self._commit_every)

    def _refuse_two_windows(self, trainer: Trainer) -> None:
        gate = self.plan.gate
        if gate is not None and gate.passes_per_update > 1 and trainer.accumulate_grad_batches > 1:
            raise ConfigurationError(
                f"the strategy line accumulates {gate.passes_per_update} batches, and the Trainer "
                f"{trainer.accumulate_grad_batches} (accumulate_grad_batches): say it in one place"
            )

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        trainer: Any = self._module.trainer
        is_divided = self._elastic is not None and trainer.training
        return self._elastic.divide(dataloader) if is_divided else dataloader

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._elastic is not None:
            self._elastic.batch_starts(batch_idx)
        trainer: Any = self._module.trainer
        passes = trainer.accumulate_grad_batches if self._module.automatic_optimization else 1  # it may be scheduled
        for update in map(update_of, self.optimizers):
            if update is not None:
                update.losses_divided_by = passes

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None, "`connect` sets it"
        call_methods(module)
        for bound in _bound_to(module):  # in an earlier fit
            bound.release()
        module.__dict__[_OPTIMIZERS] = []
        for optimizer in self.optimizers:
            if isinstance(optimizer, _MockOptimizer):  # configure_optimizers has returned None
                ud.broadcast_parameters(module.state_dict(), root_rank=0)
                continue
            refuse_bound(optimizer, "the optimizer that configure_optimizers returned")
            ud.distribute(module, optimizer, self._line)
            module.__dict__[_OPTIMIZERS].append(weakref.ref(optimizer))
            self._is_distributed = True
        self.optimizers = self.optimizers  # Lightning's wrappers look at the class of an optimizer, which has changed

    @override
    def teardown(self) -> None:
        # Gradients may be shards, which cannot be moved; and `optimizer.zero_grad` would wait for ranks that are lost.
        if self.lightning_module is not None:
            torch.nn.Module.zero_grad(self.lightning_module)
            # A strategy that changes the model may know its layers, so then they stay.
            if self._layer_sync is not None and not any(each.changes_model for each in self.plan.strategies):
                self._layer_sync.revert(self.lightning_module)
        super().teardown()

    @override
    def model_to_device(self) -> None:
        assert self.model is not None, "`connect` sets it"
        self.model.to(self.root_device)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on this rank meanwhile: `accumulate_grad_batches`, and `toggle_model(sync_grad=False)`."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                if hasattr(optimizer, "no_sync"):
                    stack.enter_context(optimizer.no_sync())
            yield

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return call_method(self._module, "training_step", *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return call_method(self._module, "validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return call_method(self._module, "test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return call_method(self._module, "predict_step", *args, **kwargs)

    @property
    def _module(self) -> torch.nn.Module:
        assert self.lightning_module is not None, "`connect` sets it"
        return self.lightning_module

    # Checkpoints: the files are Lightning's own, whole, written by rank 0

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.plan.model_axes:
            raise ConfigurationError(
                f"Lightning's checkpoints hold the whole model, and {' and '.join(self.plan.model_axes)} parallelism "
                "leaves a part of it on each rank: use Trainer(enable_checkpointing=False), and "
                "ud.save(path, model, trainer.optimizers[0]) on every rank"
            )
        make_equal(self.optimizers)
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint:
            checkpoint["unidist"] = updates_of(self.optimizers)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        load_updates(self.optimizers, checkpoint.get("unidist", ()))


def _bound_to(module: torch.nn.Module) -> list[Any]:
    found = (reference() for reference in module.__dict__.get(_OPTIMIZERS, ()))
    return [optimizer for optimizer in found if optimizer is not None]
