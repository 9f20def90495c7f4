"""`TrainStep`: one call that trains on a batch, the same with every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree
from typing_extensions import override

from unidist.elastic.step_training import Policy, Progress
from unidist.runtime import context
from unidist.runtime.of_context import OfContext
from unidist.strategy.plan import StrategyLike
from unidist.training.mean_loss import SampleWeight
from unidist.training.train_step import PlannedStep, Trees
from unidist_torch.cuda_graphs import refuse_capture
from unidist_torch.elastic.handlers import has_sharded_parameters
from unidist_torch.elastic.step_training import TrainingState
from unidist_torch.framework import TorchFramework
from unidist_torch.host_copies import HostCopy
from unidist_torch.memory import digest_of
from unidist_torch.models.model_buffers import BufferRule
from unidist_torch.models.step_runner import LossFunction, StepRunner, WholeStepRunner
from unidist_torch.training.distributed_optimizer import TorchDistribution
from unidist_torch.training.divided_training import DividedTraining
from unidist_torch.training.verification import before_step, computed_again, warn_of_ignored
from unidist_torch.training.weighted_loss import loss_of_nothing, number_of


class TrainStep(PlannedStep):
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
            With `weight`: the mean over what counts.
        strategy: a strategy line ("pipeline=2,zero=1"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        elastic: for jobs whose ranks join and leave (`unidist launch --min-np`). True, or a `ud.elastic.Policy`: each
            call is a transaction, and the loader of `ud.shard` redistributes the samples, see docs/elastic.md. False:
            nothing. Default: True if the batches come from such a loader and no `ud.elastic.run` leads the training. In
            other jobs True divides the samples in the same way.
        buffers: see `distribute`.
        weight: takes the targets, and returns by what the loss of this batch is divided, a number or a tensor with one
            element: `lambda y: (y != -100).sum()`. Then losses and gradients are those of sum(losses) / sum(weights)
            over all ranks, micro-batches of a pipeline, and passes of an update (`accumulate=N`); so is `evaluate`. 0:
            nothing counts, as in a batch of padding, and the loss function is not called; if so on all ranks, the loss
            is 0 and the gradients are zeros. Default: the number of samples, and each pass and each micro-batch counts
            the same. On a GPU the number is exchanged behind the forward pass.

    Attributes:
        optimizer: the same object, bound.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other, the model or an elastic job.
        NotInitializedError: `init()` was not called.
    """

    _trees = Trees(pytree.tree_leaves, pytree.tree_map)
    _keeps_division = True

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        strategy: StrategyLike = None,
        *,
        elastic: bool | Policy | None = None,
        buffers: BufferRule = "mean",
        weight: Callable[[Any], Any] | None = None,
    ) -> None:
        plan = context.current().plan_for(strategy)
        super().__init__(plan, TorchFramework(), elastic=elastic, weight=weight)
        self._divided: DividedTraining | None = None
        if self._rebinds:
            self._divided = DividedTraining(model, optimizer, strategy, buffers)
            self._whole = model
        else:
            distribution = TorchDistribution(model, optimizer, self._plan, in_backward=False, buffers=buffers)
            distribution.bind()
            self._whole = distribution.returned
        self.optimizer: Any = optimizer
        self._loss_fn = loss_fn
        self._weight: SampleWeight | None = None  # of the losses that are computed now
        self._num_cut = 0  # samples of the batch, if it is cut into micro-batches that the script weights
        self._has_looked = False  # whether targets are ignored
        self._copied: HostCopy | None = None
        make = self._make_runner or WholeStepRunner
        self._runner_of = OfContext[StepRunner](lambda: make(self.model, self._weighted_loss, optimizer))
        if self._divided is None:  # else they belong to ranks that this one may not have joined yet
            self._runner_of()
            self._means()

    @property
    def model(self) -> torch.nn.Module:
        """The model as this rank holds it."""
        return self._whole if self._divided is None else self._divided.model

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
            first dim of the targets), losses and gradients weigh as much as there are samples, or as `weight` says.

            A step of an elastic job that was broken off, and a rank's first one where the others are further, return
            that of the last step that counts (NaN: there was none).

        Raises:
            PeerLostError: a rank has died or could not go on; names it. Not in elastic training.
            UsageError: elastic training is asked for, and the batches do not come from `ud.shard`.
        """
        for parameter in islice(self.model.parameters(), 1):
            refuse_capture("a call of TrainStep", parameter)
        loss: torch.Tensor = self._train(inputs, targets)
        return loss

    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss of a batch in evaluation mode; arguments as for a call. Changes nothing.

        In elastic training, where ranks join and leave in between, it is not collective: the loss of this rank's batch.
        If the model is divided, the ranks of a replica call it together; do so in `ud.elastic.Policy(after_epoch=...)`.
        """
        loss: torch.Tensor = self._mean_loss_of(inputs, targets)
        return loss

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for these inputs in evaluation mode, on every rank along the model's axes."""
        return self._outputs_of(inputs)

    # See `PlannedStep`

    def _weighted_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        weight = self._weight
        if weight is None:
            return self._loss_fn(outputs, targets)
        samples, share = weight.samples, 1.0
        if self._num_cut:  # a micro-batch: the runner takes the mean over the samples of the micro-batches
            samples = self._count(targets)
            share = samples / (weight.samples or 1.0) * self._num_cut / self._num_samples((targets,))
        nothing = loss_of_nothing(outputs) if self._given_weight is not None and not samples else None
        loss = self._loss_fn(outputs, targets) if nothing is None else nothing
        # On a device the host does not wait for the loss before the backward pass.
        factor = share * weight.factor((lambda: float(loss.detach())) if loss.is_cpu else None)
        weighted = loss if factor == 1.0 else factor * loss
        if self._make_runner is None and not loss.is_cpu:
            self._copied = HostCopy(weighted.detach())
        return weighted

    @override
    def _run_batch(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> torch.Tensor:
        runner = self._runner_of()
        self.model.train()
        if weight is not None and self._make_runner is not None:
            weight.factor()  # the loss is computed in parts
        with self._weighing(batch, weight):
            return runner.run(*batch)

    @contextmanager
    def _weighing(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> Iterator[None]:
        """Weight the losses that are computed within the block."""
        is_cut = self._make_runner is not None and self._given_weight is not None
        self._weight, self._num_cut = weight, self._num_samples(batch[1:]) if is_cut else 0
        try:
            yield
        finally:
            self._weight, self._num_cut = None, 0

    def _of_rank(self, batch: tuple[Any, ...]) -> SampleWeight | None:
        """Return the weights of parts of this rank's loss, for a mean over its own batch; None: of equal samples."""
        if self._given_weight is None:
            return None
        return SampleWeight(None, lambda: self._count(*batch[1:]), is_given=True, factor=1.0)

    def _count(self, targets: Any) -> float:
        assert self._given_weight is not None
        with torch.no_grad():
            number = self._number(self._given_weight(targets))
        return number() if callable(number) else number

    @override
    def _evaluate_batch(self, batch: tuple[Any, ...]) -> torch.Tensor:
        with self._weighing(batch, self._of_rank(batch)):
            loss: torch.Tensor = super()._evaluate_batch(batch)
            return loss

    @override
    def _value(self, loss: torch.Tensor) -> float:
        copied, self._copied = self._copied, None
        return float(loss if copied is None else copied.wait())

    @override
    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @override
    def _check_first(self, batch: tuple[Any, ...]) -> None:
        if self._given_weight is None and not self._has_looked:
            self._has_looked = True
            warn_of_ignored(batch[1:], self._plan)
        weight = self._of_rank(batch)

        def loss_of(outputs: Any, targets: Any) -> torch.Tensor:
            nothing = None if weight is None or weight.samples else loss_of_nothing(outputs)
            return self._loss_fn(outputs, targets) if nothing is None else nothing

        with self._weighing(batch, weight):
            before_step(self.model, self._runner_of, loss_of, *batch)

    @override
    def _digests_of(self, batch: tuple[Any, ...]) -> Mapping[str, bytes]:
        self.model.train()
        runner = self._runner_of()
        with computed_again(self.model), self.optimizer._unidist.gradients.digesting() as found:
            with self._weighing(batch, self._of_rank(batch)):
                loss = runner.run(*batch)
            return {"the loss": digest_of(loss), **found}

    @override
    def _divisor(self, batch: tuple[Any, ...]) -> float:
        return self._num_samples(batch[1:]) or self._num_samples(batch)

    @override
    def _number(self, weight: Any) -> float | Callable[[], float]:
        return number_of(weight)

    @override
    def _scalar(self, value: float, like: torch.Tensor | None) -> torch.Tensor:
        if like is None:
            like = next(self.model.parameters(), torch.empty(0))  # a stage of a pipeline may have none
        # A tensor made from a number would be copied to an accelerator, and the host would wait for it.
        return torch.full((), value, dtype=like.dtype, device=like.device)

    @override
    def _make_state(self, progress: Progress, others: Mapping[str, Any]) -> TrainingState:
        return TrainingState(self.model, self.optimizer, progress, others)

    @override
    def _accumulate(self, passes: int) -> None:
        self._runner_of()  # which is made by all ranks together, also those without samples
        self.optimizer._unidist.accumulate_steps(passes)

    @property
    @override
    def _computes_together(self) -> bool:
        return has_sharded_parameters(self.model) or any(
            getattr(module, "unidist_runs_together", False) for module in self.model.modules()
        )
