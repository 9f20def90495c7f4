"""Sums of the gradients of a batch's micro-batches."""

from __future__ import annotations

import torch


class GradientSums:
    """Adds up the gradients of the micro-batches, in the order in which they come."""

    def __init__(self) -> None:
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
            self._sums[parameter] = gradient + total if total.is_sparse else total + gradient
            self._owned.add(parameter)

    @torch.no_grad()
    def add_product(self, parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a gradient that is the product of two matrices."""
        total = self._sums.get(parameter)
        factors_are_dense = left.layout is torch.strided and right.layout is torch.strided
        if total is not None and parameter in self._owned and not total.is_sparse and factors_are_dense:
            total.addmm_(left, right)
        else:
            self.add(parameter, left @ right)
            self._owned.add(parameter)

    def take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum, and forget it; None if there is none."""
        self._owned.discard(parameter)
        return self._sums.pop(parameter, None)

    def clear(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._owned.clear()
