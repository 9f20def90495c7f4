"""Ending a window in JAX, whose arrays do not change: `synchronize` for a `TrainStep`, and for trees of the script."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from unidist_local_sgd._jax.step import LocalStep

__all__ = ["synchronize"]

Params = TypeVar("Params")
State = TypeVar("State")


@overload
def synchronize(training: Any, /) -> bool: ...
@overload
def synchronize(training: Any, params: Params, opt_state: State, /) -> tuple[Params, State]: ...
def synchronize(training: Any, /, *trees: Any) -> Any:
    """End the present window: parameters and optimizer states are equal on all ranks afterwards.

        synchronize(step)                                                     # a TrainStep
        params, opt_state = synchronize(optimizer, params, opt_state)         # a loop of the script's own

    For the end of training, and before `save`, which needs them equal. Collective: every rank calls it between the same
    two updates. The optimizer states are averaged. Under another strategy nothing is done.

    Args:
        training: a `TrainStep`, or the optimizer that `distribute` has returned.
        trees: the parameters and the optimizer state, with an optimizer.

    Returns:
        With a `TrainStep`, whether the strategy is `local_sgd`; else the trees.
    """
    optimizer = training if trees else training.optimizer
    inner = optimizer.binding.inner
    is_local = isinstance(inner, LocalStep)
    if trees:
        params, opt_state = trees
        return inner.synchronize(params, opt_state) if is_local else (params, opt_state)
    if is_local:
        training.held, training.opt_state = inner.synchronize(training.held, training.opt_state)
    return is_local
