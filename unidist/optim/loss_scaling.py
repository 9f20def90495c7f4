"""The loss scaler: a factor for each optimizer, equal on every rank, because every rank sees the same overflows."""

from __future__ import annotations

import logging
from typing import Any

from unidist.errors import UsageError
from unidist.gradients.precision import LossScaling

_log = logging.getLogger("unidist")

MINIMUM = 2.0**-14
"""The smallest scale. A gradient that overflows at this scale is not too large for 16 bits, but infinite or NaN."""


class LossScaler:
    """The loss scale of one optimizer (Micikevicius et al. 2018, section 3.2, https://arxiv.org/abs/1710.03740).

    Args:
        scaling: initial value and growth of the scale.

    Attributes:
        scale: the factor of the loss. Changes only between two updates.
        num_skipped: updates that were skipped because a gradient had overflowed.
        on_outputs: True: the gradients of the model's outputs are multiplied in the backward pass, without changes to
            the script; False: the code that computes the loss multiplies it, and outputs are not changed.
        was_applied: set by the code that multiplies. If no rank has multiplied, the update is an error: the gradients
            would be divided by a scale that they never had.
    """

    def __init__(self, scaling: LossScaling) -> None:
        self.scale = scaling.initial
        self.num_skipped = 0
        self.on_outputs = True
        self.was_applied = False
        self._growth_interval = scaling.growth_interval
        self._good_updates = 0

    def update(self, *, overflowed: bool) -> None:
        """Halve the scale after an overflow, double it after enough updates without one. All ranks get the same scale.

        Raises:
            UsageError: the scale cannot be halved any further: the gradients are not finite at any scale.
        """
        if overflowed:
            self.num_skipped += 1
            self._good_updates = 0
            if self._growth_interval is None:
                return
            if self.scale <= MINIMUM:
                raise UsageError(
                    f"gradients are not finite at a loss scale of {self.scale:g}, the smallest: the training has "
                    "diverged. Look at the loss and the data; a smaller learning rate or clip_norm may help"
                )
            self.scale /= 2
            _log.info("a gradient overflowed: no rank updates, and the loss scale is now %g", self.scale)
            return
        self._good_updates += 1
        if self._good_updates == self._growth_interval:
            self.scale *= 2
            self._good_updates = 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; plain values only."""
        return {"scale": self.scale, "good_updates": self._good_updates, "num_skipped": self.num_skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, between two updates, the same on every rank."""
        self.scale = float(state["scale"])
        self._good_updates = int(state["good_updates"])
        self.num_skipped = int(state["num_skipped"])
