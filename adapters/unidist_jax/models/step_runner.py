"""The contract of what runs the passes of a training step in place of the compiled function of `TrainStep`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LossFunction = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""`loss_fn(params, batch, state)` returns the loss of a batch, a scalar, for the whole parameters. It is traced."""


class StepRunner(ABC):
    """Runs forward and backward passes, and the update. Collective.

    A strategy with the capability `RunsSteps` brings one: its `step_runner` returns a function that takes

        make(params, loss_fn, optimizer) -> StepRunner

    with the `DividedParameters` that its `partition` returned, a `LossFunction` and the bound optimizer.
    """

    @abstractmethod
    def run(
        self,
        held: Any,
        opt_state: Any,
        batch: Sequence[Any],
        state: Mapping[str, Any],
        *,
        scale: float | None,
        weight: float,
        trains: bool,
    ) -> tuple[Any, Any, Any]:
        """Compute the loss of this rank's batch; with `trains` also give the gradients to the optimizer.

        Args:
            held: the parameters that this rank holds, which are donated; at first the whole ones.
            opt_state: the optimizer state for these, which is donated; None at first.
            batch: see `TrainStep.__call__`.
            state: the same.
            scale: a factor for the loss of which gradients are computed; None: 1.
            weight: of this rank's loss in the mean, a factor of the loss and of its gradients, equal on all ranks that
                see the same data.
            trains: else nothing is changed, but at the first call parameters are divided all the same.

        Returns:
            The parameters and the state to go on with, and the loss of this rank's batch times its weight; equal on all
            ranks along the axes of the model.
        """
