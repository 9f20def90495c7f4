"""The contract of parameters that a strategy has divided over ranks, in place of the tree that it was given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import optax

from unidist.checkpoint.format.interface import PlacesParameters


class DividedParameters(ABC):
    """This rank's part of the parameters; `Strategy.partition` may return one in place of a tree.

    It computes the loss itself, so it is used by `TrainStep` alone.

    Attributes:
        tree: what this rank holds: a tree of arrays with the paths of the one that was given.
        places: where these belong in the whole model.
        state_places: where that belongs whose state the optimizer keeps on this rank: the same, or whole parameters.
    """

    tree: Any
    places: PlacesParameters
    state_places: PlacesParameters

    @abstractmethod
    def evaluate(self, function: Callable[[Any], Any], tree: Any) -> Any:
        """Return what a function of the whole parameters returns, computed from this rank's part. Within a trace.

        Differentiable in reverse mode: the gradient of what every rank holds is the same on all ranks, that of a part
        is this rank's. Collective where the program runs.

        Args:
            function: takes a tree of the whole parameters and returns a tree of arrays. It is traced.
            tree: like the attribute, of arrays or tracers.
        """

    @abstractmethod
    def updating(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return an optimizer of optax for what this rank holds, which makes the updates that one makes for the whole.

        The given one if it can do so. Another one may be collective; then its state may be that of whole parameters.

        Raises:
            UsageError: it looks at several parameters together.
        """

    @abstractmethod
    def held(self, whole: Any) -> Any:
        """Return this rank's part of a tree of whole parameters: a tree like the attribute."""

    @abstractmethod
    def whole(self, tree: Any) -> Any:
        """Return the whole parameters, on every rank, for a tree like the attribute. Within a trace; collective."""
