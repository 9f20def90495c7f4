"""What `TrainStep` does with a batch, in one order: each adapter's derives from `PlannedStep`.

All questions to strategies are asked here, as `Distribution` asks those of `distribute`.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from unidist.elastic.batches import BatchShare
from unidist.elastic.step_training import Policy, Progress, Redistributable, StepTraining, passes_of_step, training_of
from unidist.errors import ConfigurationError, PluginError, UsageError
from unidist.framework import Framework
from unidist.optim.update import update_of
from unidist.runtime import context
from unidist.training.mean_loss import MeanLoss, SampleWeight
from unidist.verification import Replay
from unidist.waits import calling

if TYPE_CHECKING:
    from unidist.control.elastic.member import Member
    from unidist.elastic.state import ObjectState
    from unidist.optim.interface import StepRunner
    from unidist.optim.update import Update
    from unidist.strategy.interface import Plan
    from unidist.verification import ReplicaCheck

__all__ = ["PlannedStep", "Trees"]

_log = logging.getLogger(__name__)


class Trees(NamedTuple):
    """Functions of trees of arrays: the leaves of one, and one with a function's results in place of its leaves."""

    leaves: Callable[[Any], Sequence[Any]]
    map: Callable[..., Any]


class PlannedStep(ABC):
    """Trains on batches by a plan, and evaluates them. Collective.

    An adapter's `TrainStep` derives from it. Its public methods call `_train`, `_mean_loss_of` and `_outputs_of`, and
    it fills in the others. A batch is a tuple of what the script gives, say inputs and targets.

    Args:
        plan: of the run.
        framework: the adapter's.
        elastic: the script's choice, see `unidist.elastic.training_of`.
        weight: the script's function of `_weighed` that returns by what the loss of a batch is divided; None: the
            adapter finds it, and passes count the same.
    """

    _trees: ClassVar[Trees]
    """The framework's."""
    _sampled: ClassVar[slice] = slice(None)
    """The first values of a batch, each of which has an array with the samples along its first dim."""
    _elastic_alternative: ClassVar[str] = ""
    """What scripts use in elastic jobs, because these steps are no transactions; "": they are."""
    _keeps_division: ClassVar[bool] = False
    """A divided model is rebound in each generation of an elastic job, see `passes_of_step`."""
    _runs_take_mean: ClassVar[bool] = False
    """The mean over the ranks of weighted losses is taken while the passes run: `_run_batch` returns that."""
    _is_one_program = False
    """All ranks run one program, which takes the means."""
    _replica_check: ReplicaCheck | None = None
    """Of updates in which no value is at rest: it compares after a step."""

    def __init__(
        self,
        plan: Plan,
        framework: Framework,
        *,
        elastic: bool | Policy | None = None,
        weight: Callable[..., Any] | None = None,
    ) -> None:
        self._rebinds = self._keeps_division and context.current().is_elastic and plan.divides_model
        if self._rebinds and elastic is False:
            raise ConfigurationError(
                "this job is elastic, and strategies divide the model: TrainStep(elastic=False) cannot go on when "
                "ranks change. Leave elastic= out"
            )
        if elastic or self._rebinds:
            passes_of_step(plan, keeps_division=self._keeps_division)
        self._plan, self._elastic, self._given_weight = plan, elastic, weight
        runs = plan.runs_steps
        self._make_runner: Any = None if runs is None else runs.step_runner(framework, context.current())
        self._replay = context.current().owned(Replay)
        self._replay.is_used = True
        if self._replay.every and plan.steps_alone:
            raise ConfigurationError(
                f"--verify replay={self._replay.every}: the ranks compare in one step, and with this strategy each "
                "steps when it is done. Leave replay out"
            )
        self._looks = context.current().on_nonfinite != "off"
        self._training: StepTraining | None = None
        self._has_begun = False
        self._num_steps = 0

    # The order of things, once

    @calling("train_step()")
    def _train(self, *batch: Any) -> Any:
        """Train on this rank's batch; returns the mean loss over the samples of all ranks."""
        if not self._has_begun:
            self._training = self._begin()
            self._has_begun = True
        batch = self._prepared(batch)
        self._check_first(batch)
        if self._training is not None:
            loss = self._scalar(self._training.step(functools.partial(self._train_share, batch)), None)
        else:
            if self._replay.is_due(self._num_steps + 1):
                self._replay.compare(self._num_steps + 1, functools.partial(self._digests_of, batch))
            weight = self._weight_of(batch)
            loss = self._run_batch(batch, weight)
            if weight is not None and not self._runs_take_mean:
                mean = weight.mean(functools.partial(self._own_value, loss))
                loss = self._scalar(mean, loss)
            self._update()
            self._num_steps += 1
            if self._replica_check is not None and self._replica_check.is_due(self._num_steps):
                self._replica_check.compare(f"after step {self._num_steps}")
        context.current().progress.report({"loss": loss}, self._num_samples(batch), of_step=True)
        return loss

    @calling("train_step.evaluate()")
    def _mean_loss_of(self, *batch: Any) -> Any:
        """Return the mean loss over the samples of all ranks; of this one's in elastic training."""
        batch = self._prepared(batch)
        self._pull()
        loss = self._evaluate_batch(batch)
        if self._training is not None or self._is_one_program:
            return loss
        weight = SampleWeight(self._means(), self._samples_of(batch), is_given=self._given_weight is not None)
        return self._scalar(weight.mean_without_factor(float(loss)), loss)

    @calling("train_step.predict()")
    def _outputs_of(self, inputs: Any) -> Any:
        """Return the model's outputs."""
        (inputs,) = self._prepared((inputs,))
        self._pull()
        return self._predict_batch(inputs)

    def _means(self) -> MeanLoss:
        """The means over the ranks that see different data. Collective at the first call in a runtime."""
        return context.current().owned(MeanLoss)

    def _weight_of(self, batch: tuple[Any, ...]) -> SampleWeight | None:
        """Return the weight of this rank's loss in a step; None: 1, or the program of all ranks finds it."""
        given = self._given_weight is not None
        if self._is_one_program or (self._plan.steps_alone and not given):
            return None
        means = None if self._plan.steps_alone else self._means()
        return SampleWeight(
            means, self._samples_of(batch), is_given=given, window=self._bound_update if given else None
        )

    def _samples_of(self, batch: tuple[Any, ...]) -> float | Callable[[], float]:
        """Return by what this rank's loss is divided."""
        if self._given_weight is None:
            return self._divisor(batch)
        return self._number(self._given_weight(*self._weighed(batch)))

    def _num_samples(self, batch: tuple[Any, ...]) -> int:
        """Return the size of the first dim of the first array that has dims."""
        shapes = (tuple(getattr(leaf, "shape", ())) for leaf in self._trees.leaves(batch[self._sampled]))
        return next((shape[0] for shape in shapes if shape), 0)

    # The adapter's part

    @abstractmethod
    def _run_batch(self, batch: tuple[Any, ...], weight: SampleWeight | None) -> Any:
        """Compute loss and gradients of a batch.

        Args:
            batch: as `_prepared` has returned it.
            weight: of the loss and of the gradients; None: 1.

        Returns:
            The loss of this rank's batch, times its weight: a scalar of the framework.
        """

    _runner_of: Callable[[], StepRunner]
    """Returns what runs the passes of this generation, unless the next methods are overridden."""

    def _evaluate_batch(self, batch: tuple[Any, ...]) -> Any:
        """Return the loss of this rank's batch as in inference: a scalar of the framework."""
        return self._runner_of().evaluate(*batch)

    def _predict_batch(self, inputs: Any) -> Any:
        """Return the model's outputs as in inference."""
        return self._runner_of().predict(inputs)

    def _value(self, loss: Any) -> float:
        """Return the number of what `_run_batch` has just returned."""
        return float(loss)

    def _own_value(self, loss: Any) -> float:
        value = self._value(loss)
        if self._looks:
            self._bound_update.look_at_loss(value)
        return value

    @abstractmethod
    def _scalar(self, value: float, like: Any) -> Any:
        """Return a scalar of the framework, of the type of another one; None: of that of the parameters."""

    def _prepared(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the batch as the other methods take it; build the model for it. Collective."""
        return batch

    def _check_first(self, batch: tuple[Any, ...]) -> None:  # noqa: B027 - most frameworks compare no outputs
        """Compare the divided model with the whole one, if this is the first batch. Collective."""

    def _digests_of(self, batch: tuple[Any, ...]) -> Mapping[str, bytes]:
        """Return digests of the loss and the gradients of a batch, see `unidist.verification.Digests`."""
        raise ConfigurationError(
            f"--verify replay={self._replay.every}: {type(self).__module__}.{type(self).__qualname__} can compute a "
            "batch twice where each rank has the whole model, and these strategies divide it. PyTorch's TrainStep can "
            "with all strategies"
        )

    def _divisor(self, batch: tuple[Any, ...]) -> float:
        """Return the number by which the sum of the batch's losses was divided, as far as the adapter knows it."""
        return self._num_samples(batch)

    def _weighed(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the script's function that weights a loss: those of the loss function but outputs."""
        return batch[1:]

    def _number(self, weight: Any) -> float | Callable[[], float]:
        """Return the number that the script's function has returned, or a function that waits for it.

        Raises:
            UsageError: it is no scalar.
        """
        shape = tuple(getattr(weight, "shape", ()))
        if any(size != 1 for size in shape):
            raise UsageError(
                f"TrainStep(weight=...): the function returned an array of shape {list(shape)}. It is to return one "
                "number for the batch: by what its loss is divided, say lambda y: (y != -100).sum()"
            )
        return float(weight)

    @property
    def _bound_update(self) -> Update:
        """The update of the bound optimizer."""
        update = update_of(getattr(self, "optimizer", None))
        assert update is not None, "the adapter has bound it"
        return update

    def _update(self) -> None:  # noqa: B027 - most frameworks update in the step
        """Update the parameters with the gradients of the passes, if the window is complete. Collective."""

    def _pull(self) -> None:
        """Bring the newest parameters from where a strategy keeps them."""
        if (owner := self._plan.owns_parameters) is not None:
            owner.pull()

    @property
    def _is_whole(self) -> bool:
        """Each rank has the whole model all the time, and a batch's gradients are computed without the others."""
        plan = self._plan
        return not (self._is_one_program or plan.model_axes or any(item.changes_model for item in plan.strategies))

    # Elastic training

    def _begin(self) -> StepTraining | None:
        """Begin elastic training just before the first step. Collective."""
        runtime, training = context.current(), None
        if self._replay.every and runtime.is_elastic:
            raise ConfigurationError(
                f"--verify replay={self._replay.every}: in elastic jobs no batch is computed twice. Leave it out"
            )
        if not self._elastic_alternative:
            training = training_of(runtime, self._elastic, self._make_training)
        elif (member := runtime.membership) is not None and member.generations is None and runtime.topology.rank == 0:
            _log.warning(
                "this job is elastic, and this TrainStep cannot go on when ranks change: use %s",
                self._elastic_alternative,
            )
        if training is None and self._rebinds:
            raise UsageError(
                "this job is elastic, and strategies divide the model: the batches have to come from data of ud.shard, "
                "which can divide the samples again when ranks change"
            )
        return training

    def _make_training(self, membership: Member | None, data: Redistributable, policy: Policy) -> StepTraining:
        return StepTraining(
            membership,
            data,
            policy,
            lambda progress: self._make_state(progress, policy.state),
            passes=passes_of_step(self._plan, keeps_division=self._keeps_division),
        )

    def _train_share(self, batch: tuple[Any, ...], share: BatchShare) -> float:
        """Train on this rank's share of a global batch; returns the mean loss over the samples of all ranks."""
        assert self._training is not None, "it calls this"
        means = self._means()
        sampled = batch[self._sampled]
        rest, leaves = batch[len(sampled) :], [self._trees.leaves(value) for value in sampled]
        parts = share.micro_batches(self._training.progress.batch_size, leaves)
        pieces = [((*self._trees.map(cut, sampled), *rest), factor) for cut, factor in parts]
        if self._given_weight is None:
            weights = [SampleWeight(means, 0, factor=factor) for _, factor in pieces]
        else:
            weights = self._weights_of_pieces(pieces)
        self._accumulate(len(parts))
        total = 0.0
        for (piece, factor), weight in zip(pieces, weights, strict=True):
            if factor or self._computes_together:
                total += self._value(self._run_batch(piece, weight))
            self._update()
        return total if self._runs_take_mean else means.over_samples(total, 1)[0]

    def _weights_of_pieces(self, pieces: Sequence[tuple[tuple[Any, ...], float]]) -> list[SampleWeight]:
        """Return the weights of the losses of this rank's micro-batches, where the script gives them. Collective."""
        found = [self._samples_of(piece) if factor else 0.0 for piece, factor in pieces]
        samples = [each() if callable(each) else each for each in found]
        means = self._means()
        total = SampleWeight(means, sum(samples), is_given=True).total() or 1.0
        return [SampleWeight(means, each, is_given=True, factor=each * means.size / total) for each in samples]

    def _make_state(self, progress: Progress, others: Mapping[str, Any]) -> ObjectState:
        """Return the state of training, with the attribute `progress`; see `Policy` for the others."""
        raise self._without_elastic_training()

    def _accumulate(self, passes: int) -> None:
        """Let the next update take so many passes. Collective."""
        raise self._without_elastic_training()

    def _without_elastic_training(self) -> PluginError:
        kind = type(self)
        return PluginError(
            f"{kind.__module__}.{kind.__qualname__} has no elastic training: its adapter defines neither _make_state "
            "and _accumulate nor _elastic_alternative, which names what scripts use instead"
        )

    @property
    def _computes_together(self) -> bool:
        """Whether a rank without samples computes with one that does not count, since the others wait for it."""
        return True
