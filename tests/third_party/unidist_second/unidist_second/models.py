"""What scripts make of numpy: models that compute their gradients by hand, and an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from unidist_second.binding import Binding

Array = npt.NDArray[Any]


class Model(ABC):
    """A model.

    Attributes:
        arrays: parameters and whatever else must be equal on every rank, by name.
        frozen: names of the arrays that are not trained.
    """

    arrays: dict[str, Array]
    frozen: frozenset[str] = frozenset()

    @abstractmethod
    def gradients(self, inputs: Array, targets: Array) -> Mapping[str, Array]:
        """Return the gradients of the mean loss over a batch, by name; none for a parameter that has no part in it."""


class SGD:
    """Stochastic gradient descent with momentum.

    Args:
        parameters: updated in place.
        lr: the learning rate.
        momentum: of the velocity.
    """

    def __init__(self, parameters: Mapping[str, Array], *, lr: float, momentum: float = 0.0) -> None:
        self.parameters = dict(parameters)
        self.lr = lr
        self.momentum = momentum
        self.velocities: dict[str, Array] = {}
        self.binding: Binding | None = None

    @property
    def _unidist(self) -> Binding | None:
        """Where unidist looks for the binding of an optimizer."""
        return self.binding

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Update every parameter that has a gradient; once it is distributed, with those of all ranks."""
        if self.binding is not None:
            self.binding.step(gradients)
            return
        for name, gradient in gradients.items():
            velocity = self.velocities.setdefault(name, np.zeros_like(gradient))
            self.update(self.parameters[name], velocity, gradient)

    def flush(self) -> bool:
        """Apply a window of accumulate=N that has ended early; returns whether there was one. Collective."""
        return self.binding is not None and self.binding.flush()

    def update(self, parameter: Array, velocity: Array, gradient: Array) -> None:
        """Update arrays of one shape in place: whole parameters, or pieces of them."""
        velocity *= self.momentum
        velocity += gradient
        parameter -= parameter.dtype.type(self.lr) * velocity
