"""Makes an optimizer's `Update` from the plan, with its gradient owner, accumulation and rules."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace

from unidist.checkpoint.format.interface import PlacesParameters
from unidist.errors import ConfigurationError, UsageError
from unidist.framework import Framework
from unidist.gradients.options import ExchangeOptions
from unidist.horovod_api.reduce_ops import Op
from unidist.optim.accumulation import Accumulation
from unidist.optim.interface import BringsInnerStep
from unidist.optim.loss_scaling import LossScaler
from unidist.optim.nonfinite import NonfiniteWatch
from unidist.optim.rules import GradientRules
from unidist.optim.update import Update, UpdateParts
from unidist.runtime.context import Context
from unidist.runtime_api import RuntimeAPI
from unidist.strategy.elastic_support import check_plan
from unidist.strategy.interface import (
    Plan,
)
from unidist.training.end_of_run import EndOfRun, never_applied, never_complete
from unidist.verification import Replay


def averages(op: Op) -> bool:
    """Return whether gradients are averaged over the ranks, else added up.

    Raises:
        UsageError: the operation is neither.
    """
    if op not in (Op.Average, Op.Sum):
        raise UsageError(
            f"distribute(op={Op(op).name}): gradients are averaged over the ranks, or added up; use Average or Sum"
        )
    return op is not Op.Sum


def planned_update(
    runtime: RuntimeAPI,
    plan: Plan,
    framework: Framework,
    *,
    accumulation: Accumulation | None = None,
    average: bool = True,
    options: ExchangeOptions | None = None,
    in_backward: bool = False,
    places: PlacesParameters | None = None,
    keeps_division: bool = False,
) -> Update:
    """Return the framework-free side of an optimizer.

    Args:
        runtime: the context.
        plan: names the owner of the exchange, and the strategy that counts passes.
        framework: does arithmetic on gradients.
        accumulation: how passes become updates; default: as the plan says.
        average: the gradients of the ranks are averaged, else added up.
        options: the script's options of the exchange.
        in_backward: complete it in the backward pass where the plan's owner can.
        places: of the parameters, where strategies have divided the model.
        keeps_division: the caller rebinds a model that is divided in each generation of an elastic job.

    Raises:
        ConfigurationError: the job is elastic, and a strategy does not survive the loss of a rank.
    """
    if runtime.is_elastic:
        check_plan(plan)
        if plan.divides_model and not keeps_division:
            raise ConfigurationError(
                "this job is elastic, and strategies divide the model. With such a model only PyTorch's "
                "TrainStep(model, optimizer, loss_fn) with batches of ud.shard() goes on when ranks change, and, if "
                "tensor divides it, distribute(model, optimizer) of Keras on TensorFlow. Use one of these, or launch "
                "without --min-np, --max-np and --host-discovery-script."
            )
        if options is not None and options.process_set is not None:
            raise ConfigurationError(
                "this job is elastic, and the optimizer is used with a process set, whose ranks may be lost. Leave "
                "process_set out, or launch without --min-np, --max-np and --host-discovery-script."
            )
    gate = plan.gate
    if accumulation is None:
        accumulation = (
            Accumulation(gate.passes_per_update, gate.averages_passes) if gate is not None else Accumulation()
        )
    owner = plan.owner
    options = replace(options or ExchangeOptions(), precision=plan.precision)

    def make_parts(context: RuntimeAPI) -> UpdateParts:
        return UpdateParts(
            context,
            lambda parameters, chosen: owner.make_exchange(parameters, context, framework, chosen),
            _rules_of(plan, context, framework, options),
        )

    update = Update(
        runtime,
        make_parts,
        accumulation=accumulation,
        average=average,
        strategies=plan.strategies,  # pyright: ignore[reportArgumentType]  # a ClassVar is a property for mypy only
        options=options,
        inner_steps=owner if isinstance(owner, BringsInnerStep) else None,
        in_backward=in_backward and owner.completes_in_backward,
        places=places if plan.model_axes else None,
        steps_alone=plan.steps_alone,
    )
    for item in plan.strategies:
        item.prepare_update(update, framework)
    runtime.owned(Replay).warn_if_unused("a training loop of the script's own")
    if not runtime.is_elastic:
        runtime.owned(EndOfRun).watch(functools.partial(never_applied, weakref.ref(update)))
        if accumulation.stepwise and accumulation.passes > 1:
            runtime.owned(EndOfRun).watch(functools.partial(never_complete, update.window))
    return update


def _rules_of(plan: Plan, context: RuntimeAPI, framework: Framework, options: ExchangeOptions) -> GradientRules:
    """Return the post-processing of gradients that the plan's strategies ask for. Collective.

    Args:
        plan: its strategies with the capabilities `ActsOnGradients` and `ChoosesPrecision` are asked.
        context: the runtime.
        framework: does arithmetic on gradients.
        options: which ranks exchange gradients.
    """
    rules = [item.gradient_rule() for item in plan.gradient_rules]
    precision = plan.precision
    scaler = LossScaler(precision.scaling) if precision is not None and precision.scaling is not None else None
    model_axes = plan.model_axes
    if model_axes and options.process_set is not None:
        raise UsageError(
            f"gradients within a process set cannot be clipped or scaled while the model is divided over "
            f"{' and '.join(model_axes)}; leave process_set out"
        )
    everyone = None
    looks = scaler is None and context.on_nonfinite != "off"
    if looks and plan.steps_alone:
        raise ConfigurationError(
            f"--on-nonfinite {context.on_nonfinite}: the ranks agree on each update, and with this strategy each steps "
            "when it is done. Leave --on-nonfinite out"
        )
    if scaler is not None or looks:
        everyone = context.duplicate_world() if model_axes else options.communicator(context)
    watch = None
    if looks and everyone is not None:
        watch = NonfiniteWatch(framework, everyone, context.topology.rank, skips=context.on_nonfinite == "skip")
    return GradientRules(
        framework,
        rules,
        scaler=scaler,
        everyone=everyone,
        watch=watch,
        model_axes=[context.new_communicator(name) for name in model_axes],
    )


def check_counts_alone(runtime: Context, backward_passes_per_step: int) -> None:
    """Raise UsageError if the script and a strategy of the command line both count backward passes."""
    if backward_passes_per_step != 1 and runtime.plan.gate is not None:
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step} and the command line's accumulate strategy both "
            "accumulate; use one of them"
        )


def check_leaves_model(plan: Plan, caller: str) -> None:
    """Raise UsageError if a strategy of the plan changes the model, which `caller` does not see."""
    chooser = plan.chooses_precision
    types = {chooser.name} if chooser is not None else set()
    changing = [item.name for item in plan.strategies if item.name in types or item.changes_model]
    if changing:
        raise UsageError(
            f"the model is changed by {' and '.join(map(repr, changing))}, and {caller} has the optimizer only; use "
            "model, optimizer = distribute(model, optimizer)"
        )


def check_leaves_loop(plan: Plan) -> None:
    """Raise ConfigurationError if a strategy of the plan runs the passes itself, and the script has its own loop."""
    if plan.runs_steps is not None:
        raise ConfigurationError(
            f"strategy {plan.runs_steps.name!r} runs the forward and backward passes itself, in an order of its own. "
            "Replace the loop's forward, backward and step by step = TrainStep(model, optimizer, loss_fn) and loss = "
            "step(x, y)"
        )
