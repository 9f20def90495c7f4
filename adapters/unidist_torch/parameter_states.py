"""What a torch optimizer keeps for its parameters. All of unidist reads and writes it here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from unidist.checkpoint.format.optimizer_record import STEP
from unidist_torch.composed import parts_of

__all__ = ["ParameterState", "ParameterStates", "is_slot", "scalar_dtype", "scalars_of"]

ParameterState = dict[str, Any]
"""What an optimizer keeps for one parameter, by name: slots, and scalars such as the number of updates."""


class ParameterStates:
    """The state of the parameters of an optimizer.

    Args:
        optimizer: bound or not. Under a strategy that shards updates it has no state for parameters whose state is in
            shards. The state of one that holds others is theirs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._keepers = parts_of(optimizer) or [optimizer]

    @property
    def _states(self) -> list[Any]:
        return [each.state for each in self._keepers]  # other objects after each load_state_dict()

    def _states_of(self, parameter: torch.Tensor) -> Any:
        """Return the states of the optimizer that steps on a parameter."""
        for each in self._keepers[1:]:
            if any(parameter is own for group in each.param_groups for own in group["params"]):
                return each.state
        return self._keepers[0].state

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that have state."""
        return (parameter for states in self._states for parameter, state in list(states.items()) if state)

    def of(self, parameter: torch.Tensor) -> ParameterState:
        """Return what is kept for a parameter, to be read or changed; empty before its first update."""
        found: ParameterState = next((states[parameter] for states in self._states if parameter in states), {})
        return found

    def slots(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that belong to the parameter's elements, see `is_slot`."""
        return {name: value for name, value in self.of(parameter).items() if is_slot(name, value, parameter)}

    def scalars(self, parameter: torch.Tensor) -> dict[str, int | float]:
        """Return the numbers that are kept, see `scalars_of`."""
        return scalars_of(self.of(parameter), parameter)

    def replace(self, parameter: torch.Tensor, state: ParameterState) -> None:
        """Keep this for a parameter; nothing if it is empty."""
        self.take(parameter)
        if state:
            self._states_of(parameter)[parameter] = state

    def take(self, parameter: torch.Tensor) -> ParameterState:
        """Return what is kept for a parameter; the optimizer has it no longer."""
        found: ParameterState = {}
        for states in self._states:
            found = states.pop(parameter, found)
        return found


def is_slot(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value of the state is a slot of its parameter, and no count of steps or the like.

    A tensor without dims is a slot if the parameter has none either.
    """
    if not isinstance(value, torch.Tensor):
        return False
    return value.dim() > 0 or (parameter.dim() == 0 and name not in _COUNTS)


def scalars_of(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, int | float]:
    """Return the numbers of a parameter's state, of which torch has some as tensors."""
    return {
        name: value if isinstance(value, int) else float(value)
        for name, value in state.items()
        if value is not None and not is_slot(name, value, parameter)
    }


def scalar_dtype() -> torch.dtype:
    """Return the type in which torch's optimizers count steps."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


_COUNTS = frozenset((STEP, "mu_product", "eta", "mu"))
"""What torch's optimizers keep for a parameter as one number."""
