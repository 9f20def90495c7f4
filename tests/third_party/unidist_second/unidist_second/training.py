"""`distribute(model, optimizer)` for numpy."""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist.runtime import current
from unidist.strategy import StrategyLike
from unidist.training import check_leaves_loop, planned_update
from unidist_second.binding import bind
from unidist_second.framework import NumpyFramework
from unidist_second.models import SGD, Model


def distribute(model: Model, optimizer: SGD, strategy: StrategyLike = None) -> tuple[Model, SGD]:
    """Distribute training over all ranks: copy rank 0's model to all, and bind the optimizer. Collective.

    Args:
        model: built in the same way on every rank.
        optimizer: over its parameters.
        strategy: default: the command line's.
    """
    runtime = current()
    plan = runtime.plan_for(strategy)
    check_leaves_loop(plan)
    if plan.model_axes:
        raise ConfigurationError(f"numpy's models cannot be divided along {' and '.join(plan.model_axes)}")
    if runtime.is_elastic:
        raise ConfigurationError("numpy's optimizers cannot be moved to other ranks; launch without --min-np")
    framework = NumpyFramework()
    model = plan.prepare(model, runtime)
    update = planned_update(runtime, plan, framework)
    bind(optimizer, update, names=framework.parameters(model))
    for item in plan.strategies:
        item.attach(model, update, framework)
    for array in framework.model_state(model).values():
        runtime.world.broadcast(framework.buffer(array), root=0).wait()
    return model, optimizer
