"""`TrainStep`: one call that trains on a batch, the same with every strategy."""

from __future__ import annotations

from typing import Any

import torch

from unidist import context
from unidist.mean_loss import MeanLoss
from unidist.planned_update import step_strategy
from unidist.strategy_spec import StrategyLike
from unidist_torch.distribute import spread
from unidist_torch.framework import TorchFramework
from unidist_torch.step_runner import LossFunction, StepRunner, WholeStepRunner


class TrainStep:
    """Forward, backward, exchange and update in one call, which is the same with every strategy.

        step = ud.TrainStep(model, optimizer, torch.nn.functional.cross_entropy)
        for x, y in ud.shard(loader):
            loss = step(x, y)

    Takes the place of `distribute` and of the loop's forward, backward, `step` and `zero_grad`; needed by strategies
    that run the passes themselves (`pipeline`). Copies rank 0's model to all ranks. Collective, and so is every call
    of its methods.

    Args:
        model: built alike on every rank, whole.
        optimizer: over the model's parameters. With strategies that divide the model it is over this rank's part of
            them afterwards.
        loss_fn: takes what the model returns and the targets, and returns the mean loss over the samples, a scalar.
        strategy: a strategy line ("pipeline=2,zero=1"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.

    Attributes:
        model: as this rank holds it.
        optimizer: the same object, bound.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other or the model.
        NotInitializedError: `init()` was not called.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        strategy: StrategyLike = None,
    ) -> None:
        runtime = context.current()
        plan = runtime.plan_for(strategy)
        runs = step_strategy(plan)
        make: Any = WholeStepRunner if runs is None else runs.runner_for(TorchFramework())
        self.model = spread(model, optimizer, plan, in_backward=False)
        self.optimizer: Any = optimizer
        self._runner: StepRunner = make(self.model, loss_fn, optimizer)
        self._mean_loss = MeanLoss(runtime)

    def __call__(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Train on one batch.

        With `accumulate=N` every N-th call updates the parameters.

        Args:
            inputs: this rank's share of the batch along the data axis, the same on all ranks along the others: one
                value, a tuple of positional arguments for the model, or a mapping of keyword arguments.
            targets: likewise, for the loss function.

        Returns:
            The mean loss over the batches of all ranks, a detached scalar, equal on every rank.

        Raises:
            PeerLostError: a rank has died or could not go on; names it.
        """
        self.model.train()
        loss = self._runner.run(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._mean(loss)

    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss of a batch in evaluation mode; arguments as for a call. Changes nothing."""
        return self._mean(self._runner.evaluate(inputs, targets))

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for these inputs in evaluation mode, on every rank along the model's axes."""
        return self._runner.predict(inputs)

    def _mean(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self._mean_loss(float(loss)), dtype=loss.dtype, device=loss.device)
