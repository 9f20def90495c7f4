"""Ending a window in JAX, whose arrays do not change: `synchronize` for a `TrainStep`, and for trees of the script."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from unidist.optim import update_of
from unidist_local_sgd.synchronization import synchronizer_of

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
    update = update_of(training if trees else getattr(training, "optimizer", None))
    synchronizer = None if update is None else synchronizer_of(update)
    if update is None or synchronizer is None:
        return trees or False
    params, opt_state = trees or (training.held, training.opt_state)
    state: Any = update.trained
    with state.lent(params, opt_state) as trees_now:
        synchronizer.before_save()
        found = trees_now()
    if trees:
        return found
    training.held, training.opt_state = found
    return True
