"""The step of a bound Keras optimizer, from gradients to new variables. A strategy that shards updates replaces it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from unidist_arrays.fused_exchange import ExchangeResult
from unidist_jax.optimizer import GradientLeaves, LeafPiece

Values = Sequence[Any]
"""Arrays or tracers, one for each variable."""


class InnerStep(ABC):
    """The step of one bound optimizer, without side effects, as Keras asks for it on JAX.

    `reduce` and `step` may be traced: then they work on tracers, and bind host operations.

    Attributes:
        sharded: this rank updates only its shard of the variables, so it keeps the state of that shard only.
    """

    sharded: bool = False

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether `build` has nothing left to do."""

    def prepare(self, variables: Sequence[Any]) -> None:  # noqa: B027 - most have nothing to choose
        """Choose options of the exchange. Called once, before it is made, on every rank; perhaps within a trace."""

    @abstractmethod
    def build(self, variables: Sequence[Any], leaves: Callable[[], GradientLeaves]) -> None:
        """Make the optimizer's own variables, outside of traces. Collective if `sharded`.

        Args:
            variables: of the model, which the optimizer is for.
            leaves: returns the exchange of their gradients, which is made at the first call. Collective then.
        """

    def pieces(self) -> Sequence[LeafPiece] | None:
        """Return of which elements of each variable the optimizer's state is on this rank, once built; None: of all."""
        return None

    @abstractmethod
    def reduce(self, leaves: GradientLeaves, gradients: Values, early: Sequence[int]) -> tuple[Any, list[Any]]:
        """Complete a pass. Collective.

        Args:
            leaves: exchanges the gradients.
            gradients: of this rank, by place.
            early: places of those that were handed over in the backward pass.

        Returns:
            Whether this pass completed an update, a bool scalar; and the reduced gradients, as `step` takes them.
        """

    @abstractmethod
    def flushed(self, result: ExchangeResult) -> list[Any]:
        """Return the reduced gradients of a window that was cut short, as `step` takes them."""

    @abstractmethod
    def step(self, state: Values, reduced: Values, values: Values) -> tuple[list[Any], list[Any]]:
        """Return the new values of the model's variables, and the new state.

        Args:
            state: values of `optimizer.variables`.
            reduced: gradients, as `reduce` has returned them.
            values: of the model's variables that the optimizer is for.
        """

    @abstractmethod
    def finalize(self, variables: Sequence[Any]) -> None:
        """Do what Keras asks for at the end of training: give variables their moving averages, say. Collective."""

    def take_part(self) -> None:
        """Do the step on a rank that has joined, which has no gradients. Only called if `sharded`."""
        raise NotImplementedError(f"{type(self).__name__} is sharded, and cannot join")


class WholeStep(InnerStep):
    """Every rank steps with all gradients.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
    """

    def __init__(self, optimizer: Any, plain: type[Any]) -> None:
        self._optimizer = optimizer
        self._plain = plain

    @property
    @override
    def is_built(self) -> bool:
        return bool(self._optimizer.built)

    @override
    def build(self, variables: Sequence[Any], leaves: Callable[[], GradientLeaves]) -> None:
        self._plain.build(self._optimizer, list(variables))

    @override
    def reduce(self, leaves: GradientLeaves, gradients: Values, early: Sequence[int]) -> tuple[Any, list[Any]]:
        return leaves.reduced(gradients, early)

    @override
    def flushed(self, result: ExchangeResult) -> list[Any]:
        return [jax.device_put(np.array(gradient)) for gradient in result.gradients]

    @override
    def step(self, state: Values, reduced: Values, values: Values) -> tuple[list[Any], list[Any]]:
        new_values, new_state = self._plain.stateless_apply(self._optimizer, state, reduced, values)
        return new_values, new_state

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        self._plain.finalize_variable_values(self._optimizer, variables)
