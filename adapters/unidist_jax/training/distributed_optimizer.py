"""`distribute(optimizer)` and `distribute(params, optimizer)`, and Horovod's `DistributedOptimizer`, for optax."""

from __future__ import annotations

from typing import Any, overload

import optax

from unidist.checkpoint.format.interface import PlacesParameters
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.compression import GradientCompressor
from unidist.horovod_api.arguments import Groups, OptimizerArguments, bucket_compressor, check_passes
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.optim.accumulation import Accumulation
from unidist.runtime import context
from unidist.strategy.interface import Plan
from unidist.strategy.plan import StrategyLike
from unidist.training.binding import averages, check_counts_alone, check_leaves_loop, check_leaves_model, planned_update
from unidist_jax.framework import JaxFramework
from unidist_jax.models import DividedParameters
from unidist_jax.operations import Average, Compression, Op, Sum, broadcast_parameters
from unidist_jax.optimizer import BoundOptimizer, TracedStep, bind, check_strategies
from unidist_jax.spmd import is_chosen


@overload
def distribute(
    optimizer: optax.GradientTransformation, /, *, strategy: StrategyLike = None, op: Op = Average
) -> BoundOptimizer: ...
@overload
def distribute(
    params: Any, optimizer: optax.GradientTransformation, /, strategy: StrategyLike = None, *, op: Op = Average
) -> tuple[Any, BoundOptimizer]: ...
def distribute(*given: Any, strategy: StrategyLike = None, op: Op = Average) -> Any:
    """Distribute training over all ranks; the script keeps its loop, its loss and its optimizer. Collective.

        optimizer = ud.distribute(optax.adamw(1e-3))             # or:
        params, optimizer = ud.distribute(params, optax.adamw(1e-3))

    The optimizer's `update` exchanges the gradients first, at once or within `jit`. So every rank calls it equally
    often. With the parameters given, those of rank 0 come back on every rank.

    Args:
        given: the optimizer, or a tree of parameters and the optimizer, of optax; and the strategy after them, if it is
            not given by name.
        strategy: a strategy line ("accumulate=4"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        op: Average, or Sum: gradients are added up over the ranks, for losses that are sums over samples.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other or JAX; the ranks' parameters differ (when
            `update` is traced or called first).
        UsageError: what was given is no optimizer of optax, or distributed already.
        NotInitializedError: `init()` was not called.
    """
    runtime = context.current()
    if len(given) == 1:
        plan = runtime.plan_for(strategy)
        check_leaves_loop(plan)
        check_leaves_model(plan, "distribute(optimizer)")
        return bind_to(plan, given[0], None, average=averages(op))
    if len(given) not in (2, 3):
        raise UsageError(f"distribute takes an optimizer, or parameters and an optimizer; it was given {len(given)}")
    params, optimizer = given[:2]
    plan = runtime.plan_for(given[2] if len(given) == 3 else strategy)
    check_leaves_loop(plan)
    _check_types_are_left(plan)
    params, optimizer = divided(plan, broadcast_parameters(params), optimizer)
    bound = None if isinstance(params, DividedParameters) else bind_to(plan, optimizer, params, average=averages(op))
    if bound is None or isinstance(bound.binding.inner, TracedStep):
        raise ConfigurationError(
            "this strategy divides the parameters, and here the script computes the loss from whole ones: use "
            "TrainStep(loss_fn, params, optimizer), or a strategy that leaves them whole (data, zero=2)"
        )
    return params, bound


def divided(plan: Plan, params: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return the parameters as the strategies of a plan divide them, and the optimizer for them. Collective.

    Args:
        plan: of the run.
        params: the whole parameters, equal on all ranks.
        optimizer: of optax.

    Returns:
        A tree, or `DividedParameters`; and the optimizer of what this rank has.

    Raises:
        UsageError: the optimizer cannot update this rank's part.
    """
    runtime = context.current()
    if is_chosen():
        check_strategies(plan.strategies)
    if plan.model_axes:
        runtime.divide()
    prepared = plan.prepare(params, runtime)
    if not isinstance(prepared, DividedParameters):
        return prepared, optimizer
    updating = prepared.updating(optimizer)
    if updating is not optimizer and plan.shards_updates is not None:
        raise UsageError(
            f"this optimizer looks at a parameter's whole array, and {' and '.join(plan.model_axes)} cuts parameters, "
            f"where {plan.shards_updates.name} would shard their updates as well. Leave {plan.shards_updates.name} "
            "out, or use an element-wise optimizer (sgd, adam, adamw, ...)"
        )
    return prepared, updating


def bind_to(
    plan: Plan, optimizer: Any, params: Any, *, average: bool, places: PlacesParameters | None = None
) -> BoundOptimizer:
    """Bind an optimizer as the plan says. Collective.

    Args:
        plan: of the run.
        optimizer: of optax.
        params: what `plan.prepare` has returned, or None if nobody gave the parameters.
        average: gradients are averaged over the ranks, else added up.
        places: of the parameters, where strategies have divided them.
    """
    runtime = context.current()
    framework = JaxFramework()
    update = planned_update(runtime, plan, framework, average=average, places=places)
    bound = bind(optimizer, update)
    for item in plan.strategies:
        item.attach(params, update, framework)
    return bound


def _check_types_are_left(plan: Plan) -> None:
    if plan.chooses_precision is not None:
        raise UsageError(
            f"strategy {plan.chooses_precision.name!r} chooses the types in which the loss is computed, and here "
            "the script computes the loss: use TrainStep(loss_fn, params, optimizer)"
        )


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: optax.GradientTransformation,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
) -> BoundOptimizer:
    """Return the optimizer, bound so that its `update` uses gradients reduced over all ranks.

    Unlike `distribute(params, optimizer)` it copies nothing to other ranks: call `broadcast_parameters`.

    Args:
        optimizer: of optax.
        compression: how gradients travel: a member of `Compression`, or the name of a registered compressor with its
            options ("powersgd/rank=2"), or a `unidist.gradients.compression.GradientCompressor`.
        backward_passes_per_step: `update` returns zeros but for each so many-th call, which uses the sum of their
            gradients. (`--strategy accumulate=N` gives their mean.)
        op: Average or Sum.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and the sum is multiplied by
            it over the number of ranks: keeps sums of 16-bit gradients in range.
        num_groups: deprecated; use `groups`.
        groups: a number of groups of gradients, each of which travels together.
        process_set: gradients are reduced over its ranks. A rank outside of it calls this too, and steps alone.

    Raises:
        ValueError: arguments that Horovod refuses.
        UsageError: another `op`.
    """
    runtime = context.current()
    if Op(op) not in (Average, Sum):
        raise UsageError(f"DistributedOptimizer of JAX computes Average or Sum, not {Op(op).name}")
    arguments = OptimizerArguments(
        compression=compression,
        op=Op(op),
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
    )
    options = arguments.exchange_options(
        runtime, compressor=_compressor_of(compression, runtime.plugins.compressors), position=_no_position
    )
    check_passes(backward_passes_per_step)
    check_counts_alone(runtime, backward_passes_per_step)
    check_leaves_model(runtime.plan, "DistributedOptimizer")
    accumulation = None
    if backward_passes_per_step != 1:
        accumulation = Accumulation(passes=backward_passes_per_step, average=False)
    update = planned_update(
        runtime, runtime.plan, JaxFramework(), accumulation=accumulation, average=op != Sum, options=options
    )
    return bind(optimizer, update)


def _compressor_of(compression: Any, registry: Any) -> GradientCompressor | None:
    names = {Compression.none: None, Compression.fp16: "fp16", Compression.bf16: "bf16"}
    members = {
        member: None if name is None else bucket_compressor(name, registry, members={}, otherwise=_no_compressor)
        for member, name in names.items()
    }
    return bucket_compressor(compression, registry, members=members, otherwise=_no_compressor)


def _no_compressor(compression: Any) -> GradientCompressor:
    raise ValueError(
        f"compression={compression!r}: give a member of Compression, the name of a compressor, or a GradientCompressor"
    )


def _no_position(member: Any) -> int | None:
    raise ValueError(f"groups={member!r}: arrays have no identity in JAX; give a number of groups")
