"""A check of the loss function: a pipeline needs a mean over the samples, as it computes it for each micro-batch."""

from __future__ import annotations

import math
from typing import Any

import torch

from unidist.errors import UsageError
from unidist_pipeline._torch.samples import cut, num_samples
from unidist_torch.models.step_runner import LossFunction

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2


class CheckedLoss:
    """A loss function whose first value in training is compared with the mean over two parts of its samples.

    Args:
        loss_fn: the script's.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._is_due = True

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss.

        Raises:
            UsageError: it is no mean over the samples.
        """
        loss = self._loss_fn(outputs, targets)
        if self._is_due and torch.is_grad_enabled():
            self._is_due = False
            samples = num_samples(targets)
            can_be_cut = samples >= 2 and num_samples(outputs) == samples
            if can_be_cut and isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._check(loss.detach(), outputs, targets, samples)
        return loss

    def _check(self, loss: torch.Tensor, outputs: Any, targets: Any, samples: int) -> None:
        limit = _TOLERANCES.get(loss.dtype, _COARSE) * max(1.0, abs(float(loss)))
        with torch.no_grad(), torch.random.fork_rng():
            try:
                again = self._loss_fn(outputs, targets)
                if abs(float(again) - float(loss)) > limit:
                    return  # it draws random numbers, or counts its calls
                means = [self._mean_of_parts(outputs, targets, samples, first) for first in {1, samples - 1}]
            except Exception:  # it cannot take any number of samples: nothing is known
                return
        for mean in means:
            if not math.isfinite(mean) or abs(mean - float(loss)) > limit:
                raise UsageError(
                    f"pipeline: the loss function is no mean over the samples: for a micro-batch of {samples} samples "
                    f"it is {float(loss):.6g}, and the mean over two parts of them {mean:.6g}. Does it ignore targets "
                    "(ignore_index), weigh classes, or compare samples with each other? A pipeline computes it for "
                    "each micro-batch and takes the mean, which would be another loss than that of the batch. Say what "
                    "counts, TrainStep(..., weight=lambda y: (y != -100).sum()); or let it divide by the number of "
                    "samples (reduction='sum' / len(targets)), use microbatches=1, or train with the mean over "
                    "micro-batches by --verify off"
                )

    def _mean_of_parts(self, outputs: Any, targets: Any, samples: int, first: int) -> float:
        total = 0.0
        for piece in ((0, first), (first, samples)):
            part = self._loss_fn(*(cut(each, samples, piece) for each in (outputs, targets)))
            total += float(part) * (piece[1] - piece[0]) / samples
        return total
