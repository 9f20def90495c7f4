"""Registers the option `--evaluator` of `unidist launch`, with the observer that starts the evaluator."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.observers import ObserverSpec


@hookimpl
def unidist_register_observers(registry: Registry[ObserverSpec]) -> None:
    """Register what starts the evaluator, with its option."""
    from unidist_evaluator.options import OPTIONS

    registry.add(ObserverSpec("evaluator", "unidist_evaluator.options:observer", "evaluates each checkpoint", OPTIONS))
