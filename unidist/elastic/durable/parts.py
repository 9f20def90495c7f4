"""The contents of a state's durable checkpoint: models, optimizers and the script's own values, by section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.framework_states import FrameworkStates
from unidist.checkpoint.job import CheckpointObjects
from unidist.checkpoint.plain_state import PlainState
from unidist.checkpoint.rng import SECTION as RNG
from unidist.framework import Framework
from unidist.runtime import context


@dataclass(frozen=True)
class DurableParts:
    """The contents of a state's checkpoint on this rank.

    Args:
        sections: by name; `model` and `optimizer` where `load` of a facade is to find them.
        framework: of the model; None: there is none.
    """

    sections: Mapping[str, KeepsState]
    framework: Framework | None = None


class HasStateDict(Protocol):
    """An object whose state is a dict, such as a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take what `state_dict` returned."""


def parts_of(
    states: FrameworkStates,
    models: Mapping[str, Any],
    optimizers: Mapping[str, Any],
    others: Mapping[str, HasStateDict],
    plain: Mapping[str, KeepsState],
) -> DurableParts:
    """Return the parts of a state of these values, each by the attribute that it is of the state.

    Args:
        states: of the adapter.
        models: a sole one that is called so is the section `model`.
        optimizers: likewise `optimizer`.
        others: equal on every rank.
        plain: further sections.
    """
    objects = CheckpointObjects(_sole("model", models), _sole("optimizer", optimizers))
    rank = context.current().topology.rank
    sections = dict(objects.sections(states))
    sections[RNG] = states.random(rank, objects.models())
    for name, value in others.items():
        sections[name] = PlainState(value.state_dict, value.load_state_dict, is_writer=rank == 0)
    return DurableParts({**sections, **plain}, states.framework)


def _sole(base: str, named: Mapping[str, Any]) -> Any:
    return named[base] if list(named) == [base] else dict(named) or None
