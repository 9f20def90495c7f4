"""An optimizer's `Update` as the plan says: who exchanges its gradients, and who counts its backward passes."""

from __future__ import annotations

from dataclasses import replace

from unidist.checkpoint.state import PlacesParameters
from unidist.errors import ConfigurationError, UsageError
from unidist.framework import Framework
from unidist.gradients.options import ExchangeOptions
from unidist.optim.accumulation import Accumulation
from unidist.optim.precision import precision_of
from unidist.optim.rules import rules_of
from unidist.optim.update import Update
from unidist.runtime.context import Context, gradient_owner, update_gate
from unidist.strategy.interface import ChoosesPrecision, Plan, RunsSteps, ShardsUpdates


def planned_update(
    runtime: Context,
    plan: Plan,
    framework: Framework,
    *,
    accumulation: Accumulation | None = None,
    average: bool = True,
    options: ExchangeOptions | None = None,
    in_backward: bool = False,
    places: PlacesParameters | None = None,
) -> Update:
    """Return the framework-free side of an optimizer.

    Args:
        runtime: the context.
        plan: names the owner of the exchange, and the strategy that counts passes.
        framework: does arithmetic on gradients.
        accumulation: how passes become updates; default: as the plan says.
        average: the gradients of the ranks are averaged, else added up.
        options: what the script asks of the exchange.
        in_backward: complete it in the backward pass where the plan's owner can.
        places: of the parameters, where strategies have divided the model.
    """
    gate = update_gate(plan)
    if accumulation is None:
        accumulation = (
            Accumulation(gate.passes_per_update, gate.averages_passes) if gate is not None else Accumulation()
        )
    owner = gradient_owner(plan)
    options = replace(options or ExchangeOptions(), precision=precision_of(plan))
    update = Update(
        runtime,
        lambda parameters, chosen: owner.make_exchange(parameters, runtime, framework, chosen),
        accumulation=accumulation,
        average=average,
        strategies=plan.strategies,
        options=options,
        sharding=owner if isinstance(owner, ShardsUpdates) else None,
        rules=rules_of(plan, runtime, framework, options),
        in_backward=in_backward and owner.completes_in_backward,
    )
    if places is not None and plan.model_axes:
        update.copies = places.copies

    def renew(context: Context) -> Update:
        return planned_update(
            context,
            context.plan_for(list(plan.strategies)),
            framework,
            accumulation=accumulation,
            average=average,
            options=options,
            in_backward=in_backward,
        )

    update.renew = renew
    return update


def check_counts_alone(runtime: Context, backward_passes_per_step: int) -> None:
    """Raise UsageError if the script and a strategy of the command line both count backward passes."""
    if backward_passes_per_step != 1 and update_gate(runtime.plan) is not None:
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step} and the command line's accumulate strategy both "
            "accumulate; use one of them"
        )


def check_leaves_model(plan: Plan, caller: str) -> None:
    """Raise UsageError if a strategy of the plan changes the model, which `caller` does not see."""
    changing = [item.name for item in plan.strategies if isinstance(item, ChoosesPrecision) or item.changes_model]
    if changing:
        raise UsageError(
            f"strategy {' and '.join(map(repr, changing))} changes the model, and {caller} has the optimizer only; use "
            "model, optimizer = distribute(model, optimizer)"
        )


def check_leaves_loop(plan: Plan) -> None:
    """Raise ConfigurationError if a strategy of the plan runs the passes itself, and the script has its own loop."""
    running = [item.name for item in plan.strategies if isinstance(item, RunsSteps)]
    if running:
        raise ConfigurationError(
            f"strategy {running[0]!r} runs the forward and backward passes itself, in an order of its own. Replace the "
            "loop's forward, backward and step by step = TrainStep(model, optimizer, loss_fn) and loss = step(x, y)"
        )


def step_strategy(plan: Plan) -> RunsSteps | None:
    """Return the strategy that runs the passes of a step, if there is one."""
    return next((item for item in plan.strategies if isinstance(item, RunsSteps)), None)
