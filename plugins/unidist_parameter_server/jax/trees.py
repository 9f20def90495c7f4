"""The parameters of the store in JAX, whose arrays do not change: for a `TrainStep`, and for trees of the script."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from unidist_parameter_server._jax.step import JaxStoreStep

__all__ = ["pull", "synchronize"]

Params = TypeVar("Params")
State = TypeVar("State")


@overload
def pull(training: Any, /) -> bool: ...
@overload
def pull(training: Any, params: Params, /) -> Params: ...
def pull(training: Any, /, *trees: Any) -> Any:
    """Fetch the newest parameters, before an evaluation in an asynchronous mode, say. Not collective.

        pull(step)                               # a TrainStep
        params = pull(optimizer, params)         # a loop of the script's own

    Args:
        training: a `TrainStep`, or the optimizer that `distribute` has returned.
        trees: the parameters, with an optimizer.

    Returns:
        With a `TrainStep`, whether the strategy is `parameter_server`; else the parameters.
    """
    inner = _inner_of(training if trees else training.optimizer)
    if trees:
        return trees[0] if inner is None else inner.pulled(trees[0])
    if inner is not None:
        training.held = inner.pulled(training.held)
    return inner is not None


@overload
def synchronize(training: Any, /) -> bool: ...
@overload
def synchronize(training: Any, params: Params, opt_state: State, /) -> tuple[Params, State]: ...
def synchronize(training: Any, /, *trees: Any) -> Any:
    """Push what was not pushed, and give all ranks the parameters of the store and rank 0's optimizer state.

        synchronize(step)
        params, opt_state = synchronize(optimizer, params, opt_state)

    Before `save`, and at the end of training. Collective. Under another strategy nothing is done.

    Args:
        training: see `pull`.
        trees: the parameters and the optimizer state, with an optimizer.

    Returns:
        With a `TrainStep`, whether the strategy is `parameter_server`; else the trees.
    """
    inner = _inner_of(training if trees else training.optimizer)
    if trees:
        params, opt_state = trees
        return (params, opt_state) if inner is None else inner.synchronized(params, opt_state)
    if inner is not None:
        training.held, training.opt_state = inner.synchronized(training.held, training.opt_state)
    return inner is not None


def _inner_of(optimizer: Any) -> JaxStoreStep | None:
    inner = optimizer.binding.inner
    return inner if isinstance(inner, JaxStoreStep) else None
