"""The strategy of `lightning.Fabric`: the loop is the script's, the exchange and the optimizer's step are unidist's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.strategy import StrategyLike
from unidist_lightning.versions import check_version

check_version()  # before the imports below fail in other ways

from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision  # noqa: E402
from lightning.fabric.strategies import ParallelStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402

from unidist_lightning.environment import UnidistEnvironment  # noqa: E402
from unidist_lightning.ranks import Ranks, refuse_bound  # noqa: E402
from unidist_torch.training import sync_metrics  # noqa: E402

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator


class UnidistFabricStrategy(Ranks, ParallelStrategy):
    """Trains on the ranks of a unidist job: `Fabric(strategy="unidist")`.

        fabric = lightning.Fabric(strategy=UnidistFabricStrategy("zero=2"))
        model, optimizer = fabric.setup(model, optimizer)

    Model and optimizers have to be given to one call of `setup`.

    Args:
        strategy: a strategy line, strategy objects, or a list of both; default: the command line's
            (`unidist launch --strategy`), else plain data parallelism.
        accelerator: see Lightning's `ParallelStrategy`, also for the rest.
        parallel_devices: the devices of this host; rank N of the host takes the N-th.
        cluster_environment: a `UnidistEnvironment`, or None.
        checkpoint_io: reads and writes the checkpoint files.
        precision: of the passes; strategies of the line (`precision=bf16`) come on top.
    """

    def __init__(
        self,
        strategy: StrategyLike = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment or UnidistEnvironment(),
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._line = strategy
        self._backward_sync_control = _NoSync()

    @override
    def _configure_launcher(self) -> None:
        """Start unidist; Lightning calls it when a Fabric is made, and launches nothing. Collective."""
        self.join_job()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.check_settings()

    @override
    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], *scheduler: Any
    ) -> Any:
        sync_metrics(module)
        for optimizer in optimizers:
            refuse_bound(optimizer, "an optimizer that was given to fabric.setup")
            module, _ = ud.distribute(module, optimizer, self._line)
        return (module, optimizers, *scheduler)

    @override
    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Set up a model that is only evaluated, or whose optimizer never comes: `setup_optimizer` refuses it."""
        sync_metrics(module)
        ud.broadcast_parameters(module.state_dict(), root_rank=0)
        return module

    @override
    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        raise UsageError(
            "unidist distributes a model with its optimizer: model, optimizer = fabric.setup(model, optimizer), in "
            "place of setup_module and setup_optimizers"
        )

    @override
    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    @override
    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        self.precision.unscale_gradients(optimizer)
        return ud.clip_grad_norm_(optimizer, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        ud.clip_grad_value_(optimizer, clip_val)

    @override
    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        if self.plan.model_axes:
            raise ConfigurationError(
                f"fabric.save writes the whole model, and {' and '.join(self.plan.model_axes)} parallelism leaves a "
                "part of it on each rank: use ud.save(path, model, optimizer) on every rank"
            )
        return super().get_module_state_dict(module)


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync(model)`: gradients stay on this rank meanwhile."""

    @override
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not hasattr(module, "no_sync"):
            raise UsageError(
                "no_backward_sync needs a model that was given to fabric.setup together with its optimizer"
            )
        made: AbstractContextManager[None] = module.no_sync()  # type: ignore[operator]  # of a distributed model
        return made
