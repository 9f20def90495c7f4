"""The count of backward passes per update, without gradients.

There are two kinds of accumulation, which differ in who counts the passes. *Stepwise* (`--strategy accumulate=N`): the
script calls `step` after every pass, and all but every N-th call do nothing. *Horovod's*
(`backward_passes_per_step=N`): the script calls `step` after N passes itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from unidist.errors import UsageError
from unidist.optim.loss_weights import LossWeights


@dataclass(frozen=True)
class Accumulation:
    """The accumulation of backward passes into updates.

    Args:
        passes: backward passes per update, at least 1.
        average: the update uses the mean over the passes, else their sum.
        stepwise: the script calls `step` after every pass, else once per update.
    """

    passes: int = 1
    average: bool = True
    stepwise: bool = True

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise UsageError(f"{self.passes} backward passes per update: give at least 1")


class Window:
    """The progress of the backward passes of one update.

    A *round* begins with its first gradient and ends with the exchange; a window of several passes is one round.

    Args:
        accumulation: of backward passes into updates.

    Attributes:
        in_round: gradients were computed whose exchange is not complete.
        finished: the exchange of the window is complete.
        num_steps_in_all: calls of `step`, of all windows until now; stepwise only.
        was_complete: a window was complete, or `flush` has ended one early.
        weights: of the losses of its passes.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self.accumulation = accumulation
        self.in_round = False
        self.finished = False
        self.num_steps_in_all = 0
        self.was_complete = False
        self.weights = LossWeights()
        self._is_weighed = False  # and no gradient has come since
        self._passes: list[int] = []  # of each parameter
        self._num_steps = 0  # calls of `step` in this window, stepwise only

    def add_parameters(self, count: int) -> None:
        """Count the passes of `count` more parameters too, numbered after the earlier ones."""
        self._passes += [0] * count

    @property
    def is_open(self) -> bool:
        """True in the middle of a stepwise window."""
        return self._num_steps > 0

    @property
    def completes(self) -> bool:
        """True when the next `step` updates the parameters."""
        return not self.accumulation.stepwise or self._num_steps >= self.accumulation.passes - 1

    @property
    def num_passes(self) -> int:
        """The number of passes so far: the largest of any parameter, or the number of steps."""
        return max(self._num_steps, max(self._passes, default=0))

    def has_passes(self, index: int) -> bool:
        """Return whether parameter `index` had a gradient in this window."""
        return self._passes[index] > 0

    def is_last_pass(self, index: int) -> bool:
        """Return whether the pass that is computing the gradient of parameter `index` is the last of its window."""
        if self.accumulation.stepwise:
            return self._num_steps == self.accumulation.passes - 1
        return self._passes[index] >= self.accumulation.passes - 1

    def count_pass(self, index: int, name: str) -> None:
        """Note that a pass has computed the gradient of parameter `index`, which is called `name`.

        Raises:
            UsageError: all passes of the window are complete, and exchanged.
        """
        if self.finished and self.accumulation.passes > 1:
            raise UsageError(
                f"a second backward pass before step() reached {name!r}, but the window of {self.accumulation.passes} "
                "passes is complete. accumulate=N counts one backward pass per step(): leave it out, several add up "
                "by themselves, or add the losses up before backward()"
            )
        self._passes[index] += 1
        self.finished = False
        self._is_weighed = False

    def count_step(self) -> bool:
        """Count a call of `step` and return whether it updates the parameters."""
        self._is_weighed = False  # also on a rank where the pass had none
        if not self.accumulation.stepwise or self.accumulation.passes == 1:
            return True
        self._num_steps += 1
        self.num_steps_in_all += 1
        completes = self._num_steps >= self.accumulation.passes
        self.was_complete |= completes
        return completes

    def finish_round(self) -> None:
        """Note that the exchange is complete."""
        self.in_round = False
        self.finished = True
        if self.accumulation.passes == 1:
            self._passes = [0] * len(self._passes)  # another backward pass before the step begins another round

    @property
    def adds_extra_passes(self) -> bool:
        """Whether the script may make several backward passes where one is counted; Horovod's counts them all."""
        return self.accumulation.stepwise or self.accumulation.passes == 1

    def end_extra_pass(self) -> None:
        """Note that the exchange of one of several backward passes before a step is complete."""
        self._passes = [0] * len(self._passes)

    def weigh(self, total: float) -> float:
        """Note the weights of a pass, see `LossWeights.add`."""
        if self.finished:
            self.weights.settle()
        is_term, self._is_weighed = self._is_weighed and not self.finished, True
        return self.weights.add(total, is_term=is_term)

    def reset(self) -> None:
        """Start the next window with no passes. Gradients that were not exchanged are still in their round."""
        if self.weights.is_used:
            self.weights, self._is_weighed = LossWeights(), False
        self._passes = [0] * len(self._passes)
        self._num_steps = 0
        self.finished = False

    def change(self, accumulation: Accumulation) -> None:
        """Change the accumulation of the next updates; only between two rounds."""
        assert not self.in_round, "the count of passes is changed between two updates"
        self.accumulation = accumulation
        self.reset()
