"""The steps of `distribute` and of `TrainStep`, in their order: a model is divided, and its optimizer bound.

Each adapter has a `Distribution` for its models. All questions to strategies are asked here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unidist.checkpoint.format.interface import PlacesParameters, placements_of
from unidist.framework import Framework
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.training.binding import planned_update
from unidist.verification import CheckpointCheck, FirstBatchCheck, replica_check

if TYPE_CHECKING:
    from unidist.checkpoint.format.pieces import Piece
    from unidist.strategy.interface import Plan

__all__ = ["Distribution"]


class Distribution(ABC):
    """Distributes the training of one model by one optimizer.

    Args:
        model: the whole model, as the script made it.
        optimizer: over its parameters.
        plan: of the run.

    Attributes:
        framework: the adapter's.
        in_backward: gradients are complete when the backward pass ends, where the plan's owner can; else at the step.
        is_at_rest: when an update is applied, a rank's parameters can be read; else in checkpoints alone.
        model: after `bind`, as this rank holds it.
        optimizer: after `bind`, bound.
        plan: see Args.
        runtime: the present one.
    """

    framework: Framework
    in_backward = False
    is_at_rest = True

    def __init__(self, model: Any, optimizer: Any, plan: Plan) -> None:
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self.runtime = context.current()

    def bind(
        self, *, average: bool = True, keeps_division: bool = False, divide: Callable[[], Any] | None = None
    ) -> None:
        """Do all steps. Collective.

        Args:
            average: gradients are averaged over the ranks, else added up.
            keeps_division: the caller rebinds a divided model in each generation of an elastic job.
            divide: returns this rank's part of the model as the others hold theirs already, whose values are to be
                loaded; then nothing is copied from rank 0. None: the plan divides it on all ranks now.
        """
        runtime, plan = self.runtime, self.plan
        self.check(keeps_division=keeps_division)
        if plan.model_axes and divide is None:
            self.prepare_to_divide()
        outputs = self.output_check(is_new=divide is None)
        self.model = plan.prepare(self.model, runtime) if divide is None else divide()
        self.follow_division()
        update = planned_update(
            runtime,
            plan,
            self.framework,
            average=average,
            in_backward=self.in_backward,
            places=self.places,
            keeps_division=keeps_division,
        )
        self.bind_optimizer(update)
        for item in plan.strategies:
            item.attach(self.model, update, self.framework)
        self.finish_binding(update)
        check = replica_check(runtime, plan, self.pieces, in_generations=self.is_at_rest)
        if check is not None:
            update.follow(check if self.is_at_rest else CheckpointCheck(check))
        if outputs is not None:
            self.compare_outputs(outputs)
        self.make_equal(is_new=divide is None)

    @abstractmethod
    def check(self, *, keeps_division: bool) -> None:
        """Raise an error if the model or the optimizer cannot be distributed, or not by this plan."""

    def prepare_to_divide(self) -> None:  # noqa: B027 - most frameworks divide nothing
        """Give the whole model and the optimizer rank 0's values: strategies are about to divide it. Collective."""

    def output_check(self, *, is_new: bool) -> FirstBatchCheck | None:
        """Return the comparison of the divided model with the whole one on the first batch; None: there is none."""
        return None

    def follow_division(self) -> None:  # noqa: B027 - most frameworks divide nothing
        """Let the optimizer have what this rank holds of the model."""

    @property
    def places(self) -> PlacesParameters:
        """Where this rank's parameters belong."""
        return placements_of(self.model)

    @abstractmethod
    def bind_optimizer(self, update: Update) -> None:
        """Bind the optimizer to the update. Collective."""

    def finish_binding(self, update: Update) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Do what comes after the strategies' `attach`. Collective."""

    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """Return the trained parameters that this rank holds, as in a checkpoint."""

    def compare_outputs(self, check: FirstBatchCheck) -> None:  # noqa: B027 - only if there is an `output_check`
        """Leave the comparison for the first batch."""

    @abstractmethod
    def make_equal(self, *, is_new: bool) -> None:
        """Give every rank rank 0's values, unless the model is divided: then it has them. Collective.

        Args:
            is_new: the model was divided now, on all ranks; else its values are loaded next.
        """
