"""`TrainStep`: one call that trains on a batch, the same with every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unidist.elastic.batches import BatchShare
from unidist.elastic.step_training import Policy, Redistributable, StepTraining, passes_of_step, training_of
from unidist.errors import ConfigurationError, UsageError
from unidist.runtime import context
from unidist.runtime.of_context import OfContext
from unidist.strategy.interface import GradientOwner, OwnsParameters, RunsSteps
from unidist.strategy.plan import StrategyLike
from unidist.training.mean_loss import MeanLoss
from unidist.waits import calling
from unidist_torch.elastic.handlers import has_sharded_parameters
from unidist_torch.elastic.step_training import PiecewiseStep, TrainingState
from unidist_torch.framework import TorchFramework
from unidist_torch.models.batches import num_samples
from unidist_torch.models.model_buffers import BufferRule
from unidist_torch.models.step_runner import LossFunction, StepRunner, WholeStepRunner
from unidist_torch.training.distributed_optimizer import bind_model
from unidist_torch.training.divided_training import DividedTraining, divides
from unidist_torch.training.verification import before_step

if TYPE_CHECKING:
    from unidist.control.elastic.member import Member


class TrainStep:
    """Forward, backward, exchange and update in one call, which is the same with every strategy.

        step = ud.TrainStep(model, optimizer, torch.nn.functional.cross_entropy)
        for x, y in ud.shard(loader):
            loss = step(x, y)

    Takes the place of `distribute` and of the loop's forward, backward, `step` and `zero_grad`; needed by strategies
    that run the passes themselves (`pipeline`). Copies rank 0's model to all ranks. Collective, and so is every call
    of its methods.

    Args:
        model: built in the same way on every rank, whole.
        optimizer: over the model's parameters. With strategies that divide the model it is over this rank's part of
            them afterwards.
        loss_fn: takes what the model returns and the targets, and returns the mean loss over the samples, a scalar.
        strategy: a strategy line ("pipeline=2,zero=1"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        elastic: for jobs whose ranks join and leave (`unidist launch --min-np`). True, or a `ud.elastic.Policy`: each
            call is a transaction, and the loader of `ud.shard` redistributes the samples, see docs/elastic.md. False:
            nothing. Default: True if the batches come from such a loader and no `ud.elastic.run` leads the training. In
            other jobs True divides the samples in the same way.
        buffers: see `distribute`.

    Attributes:
        optimizer: the same object, bound.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other, the model or an elastic job.
        NotInitializedError: `init()` was not called.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        strategy: StrategyLike = None,
        *,
        elastic: bool | Policy | None = None,
        buffers: BufferRule = "mean",
    ) -> None:
        runtime = context.current()
        plan = runtime.plan_for(strategy)
        if elastic:
            passes_of_step(plan, keeps_division=True)
        runs = plan.find(RunsSteps)
        make: Any = WholeStepRunner if runs is None else runs.step_runner(TorchFramework(), context.current())
        self._divided: DividedTraining | None = None
        if divides(strategy):
            if elastic is False:
                raise ConfigurationError(
                    "this job is elastic, and strategies divide the model: TrainStep(elastic=False) cannot go on when "
                    "ranks change. Leave elastic= out"
                )
            passes_of_step(plan, keeps_division=True)
            self._divided = DividedTraining(model, optimizer, strategy, buffers)
            self._whole = model
        else:
            self._whole = bind_model(model, optimizer, plan, in_backward=False, buffers=buffers)
        self.optimizer: Any = optimizer
        self._make_runner = lambda loss: make(self.model, loss, optimizer)
        self._loss_fn = loss_fn
        self._runs_in_parts = runs is not None
        self._weight: SampleWeight | None = None
        self._runner_of = OfContext[StepRunner](lambda: self._make_runner(self._weighted_loss))
        self._mean_loss_of = OfContext(lambda: MeanLoss(context.current()))
        if self._divided is None:  # else they belong to ranks that this one may not have joined yet
            self._runner_of()
            self._mean_loss_of()
        self._plan, self._elastic = plan, elastic
        self._has_begun = False
        self._training: StepTraining | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The model as this rank holds it."""
        return self._whole if self._divided is None else self._divided.model

    @calling("train_step()")
    def __call__(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Train on one batch.

        With `accumulate=N` every N-th call updates the parameters.

        Args:
            inputs: this rank's share of the batch along the data axis, the same on all ranks along the others: one
                value, a tuple of positional arguments for the model, or a mapping of keyword arguments.
            targets: likewise, for the loss function.

        Returns:
            The mean loss over the samples of all ranks, a detached scalar, equal on every rank. If ranks step alone
            (parameter_server=async), that of this rank's batch. Where ranks have different numbers of samples (the
            first dim of the targets), losses and gradients weigh as much as there are samples.

            A step of an elastic job that was broken off, and a rank's first one where the others are further, return
            that of the last step that counts (NaN: there was none).

        Raises:
            PeerLostError: a rank has died or could not go on; names it. Not in elastic training.
            UsageError: elastic training is asked for, and the batches do not come from `ud.shard`.
        """
        if not self._has_begun:
            self._training = training_of(context.current(), self._elastic, self._make_training)
            self._has_begun = True
        self.model.train()
        if self._training is None and self._divided is not None:
            raise UsageError(
                "this job is elastic, and strategies divide the model: the batches have to come from ud.shard(loader), "
                "which can divide the samples again when ranks change"
            )
        if self._training is not None:
            told = self._training.step(lambda share: self._take(share, inputs, targets))
            context.current().progress.report({"loss": told}, num_samples(inputs))
            return self._like_parameters(told)
        runner = self._runner_of()
        before_step(self.model, runner, self._loss_fn, inputs, targets)
        alone = self._plan.the(GradientOwner).steps_alone
        mean = runner.run(inputs, targets) if alone else self._of_all_samples(runner.run, inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        context.current().progress.report({"loss": mean}, num_samples(inputs))
        return mean

    @calling("train_step.evaluate()")
    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss of a batch in evaluation mode; arguments as for a call. Changes nothing.

        In elastic training, where ranks join and leave in between, it is not collective: the loss of this rank's batch.
        If the model is divided, the ranks of a replica call it together; do so in `ud.elastic.Policy(after_epoch=...)`.
        """
        if (owner := self._plan.find(OwnsParameters)) is not None:
            owner.pull()
        if self._training is not None:
            return self._like_parameters(float(self._runner_of().evaluate(inputs, targets)))
        return self._of_all_samples(self._runner_of().evaluate, inputs, targets)

    @calling("train_step.predict()")
    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for these inputs in evaluation mode, on every rank along the model's axes."""
        return self._runner_of().predict(inputs)

    def _of_all_samples(self, run: Callable[[Any, Any], torch.Tensor], inputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss over the samples of all ranks of what is run on this one's."""
        samples = num_samples(targets) or num_samples(inputs)
        self._weight = SampleWeight(self._mean_loss_of(), samples, in_parts=self._runs_in_parts)
        try:
            loss = run(inputs, targets)
            return torch.tensor(self._weight.mean(loss), dtype=loss.dtype, device=loss.device)
        finally:
            self._weight = None

    def _weighted_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        loss = self._loss_fn(outputs, targets)
        return loss if self._weight is None else self._weight.weighted(loss)

    # Elastic training

    def _make_training(self, membership: Member | None, data: Redistributable, policy: Policy) -> StepTraining:
        passes = passes_of_step(self._plan, keeps_division=True)
        together = has_sharded_parameters(self.model) or any(
            getattr(module, "unidist_runs_together", False) for module in self.model.modules()
        )
        self._pieces = PiecewiseStep(self._make_runner, self._loss_fn, self.optimizer, together=together)
        return StepTraining(
            membership,
            data,
            policy,
            lambda progress: TrainingState(self.model, self.optimizer, progress, policy.state),
            passes=passes,
        )

    def _take(self, share: BatchShare, inputs: Any, targets: Any) -> float:
        assert self._training is not None, "it calls this"
        return self._pieces.train(share, inputs, targets, batch_size=self._training.progress.batch_size)

    def _like_parameters(self, loss: float) -> torch.Tensor:
        parameter = next(self.model.parameters(), torch.empty(0))  # a stage of a pipeline may have none
        return torch.tensor(loss, dtype=parameter.dtype, device=parameter.device)


class SampleWeight:
    """Lets the loss of a rank weigh as much in the mean over the ranks as the rank has samples. Collective.

    Where the loss of a step is computed at once, one exchange between the passes tells its weight and the mean. Where
    it is computed in parts (a pipeline), the weight has to be known before.

    Args:
        means: over the ranks.
        samples: of this rank.
        in_parts: the loss is computed in parts.
    """

    def __init__(self, means: MeanLoss, samples: int, *, in_parts: bool) -> None:
        self._means, self._samples = means, samples
        self._factor = means.over_samples(0.0, samples)[1] if in_parts else None
        self._mean: float | None = None

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, or a part of it, times this rank's weight."""
        if self._factor is None:
            self._mean, self._factor = self._means.over_samples(float(loss.detach()), self._samples)
        return loss if self._factor == 1.0 else self._factor * loss

    def mean(self, loss: torch.Tensor) -> float:
        """Return the mean over the samples of all ranks, of this rank's weighted loss."""
        return self._means.of_all(float(loss)) if self._mean is None else self._mean
