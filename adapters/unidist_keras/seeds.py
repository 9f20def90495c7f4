"""The seeds of a model's layers, and which of them differ between ranks that hold one replica of a divided model."""

from __future__ import annotations

from typing import Any

__all__ = ["differ_in_replica", "differs_in_replica", "seeds_of"]

_DIFFERS = "_unidist_differs_in_replica"


def seeds_of(model: Any) -> list[Any]:
    """Return the states of a model's seed generators, variables, in Keras' order."""
    known = {id(each) for each in [*model.weights, *getattr(model, "metrics_variables", ())]}
    return [each for each in model.variables if id(each) not in known]


def differ_in_replica(state: Any) -> None:
    """Mark the state of a seed generator: ranks that hold one replica of the model together draw different numbers.

    For layers that compute a part on each of them. All others have to draw the same.
    """
    setattr(state, _DIFFERS, True)


def differs_in_replica(state: Any) -> bool:
    """Return whether the state of a seed generator was marked, see `differ_in_replica`."""
    return bool(getattr(state, _DIFFERS, False))
