"""Sums of the gradients of a batch's micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GradientSums:
    """Adds up the gradients of the micro-batches, in the order in which they arrive.

    Args:
        memory: returns for a parameter memory for the sum; None: use new memory. Default: new memory.
    """

    def __init__(self, memory: Callable[[torch.Tensor], torch.Tensor | None] = lambda parameter: None) -> None:
        self._memory = memory
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._owned: set[torch.Tensor] = set()

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add a gradient, which autograd may use elsewhere too."""
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient
        elif parameter in self._owned and not total.is_sparse:
            total += gradient
        else:
            if gradient.is_sparse or total.is_sparse:
                self._sums[parameter] = gradient + total if total.is_sparse else total + gradient
            else:
                self._sums[parameter] = torch.add(total, gradient, out=self._memory(parameter))
            self._owned.add(parameter)

    @torch.no_grad()
    def add_product(self, parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a gradient that is the product of two matrices."""
        total = self._sums.get(parameter)
        if left.layout is not torch.strided or right.layout is not torch.strided:
            self.add(parameter, left @ right)
        elif total is None:
            self._sums[parameter] = torch.mm(left, right, out=self._memory(parameter))
            self._owned.add(parameter)
        elif parameter in self._owned and not total.is_sparse:
            total.addmm_(left, right)
        else:
            self.add(parameter, left @ right)

    def pop(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum, and forget it; None if there is none."""
        self._owned.discard(parameter)
        return self._sums.pop(parameter, None)

    def clear(self) -> None:
        """Drop all sums."""
        self._sums.clear()
        self._owned.clear()
