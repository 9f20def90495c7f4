"""The ways to make training with Keras on JAX distributed: `distribute`, and Horovod's `DistributedOptimizer`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
from typing_extensions import override

from unidist.checkpoint.format.pieces import Piece
from unidist.elastic.step_training import Policy, passes_of_step
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.compression import GradientCompressor
from unidist.gradients.options import ExchangeOptions
from unidist.horovod_api.arguments import Groups, OptimizerArguments, bucket_compressor, check_passes
from unidist.horovod_api.reduce_ops import Op
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.optim.accumulation import Accumulation
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.strategy.interface import Plan
from unidist.strategy.plan import StrategyLike
from unidist.training.binding import averages, check_counts_alone, check_leaves_loop, check_leaves_model, planned_update
from unidist.training.distribution import Distribution
from unidist.verification import replica_check
from unidist_jax.compiled import flush, take_failure
from unidist_jax.framework import JaxFramework
from unidist_jax.keras.binding import Binding, check_can_distribute, raise_failure
from unidist_jax.keras.data import fingerprint
from unidist_jax.keras.elastic_fit import ElasticFit
from unidist_jax.keras.mixin import bind
from unidist_jax.keras.overlap import overlap_backward
from unidist_jax.operations import Average, Compression, Sum
from unidist_keras.arguments import check_unsharded, listed_groups, local_variables
from unidist_keras.checkpoint import trained_pieces
from unidist_keras.fit_agreement import agree_in_fit, hyperparameters
from unidist_keras.losses.weight import weigh_batches, weights_samples
from unidist_keras.mixin import check_plain, scales_loss
from unidist_keras.running_statistics import share_statistics
from unidist_keras.unsharded_data import warn_in_fit


def distribute(
    model: Any,
    optimizer: Any = None,
    strategy: StrategyLike = None,
    *,
    elastic: bool | Policy | None = None,
    op: Op = Average,
) -> tuple[Any, Any]:
    """Distribute training over all ranks, for `model.fit` and for custom training loops.

        model, optimizer = ud.distribute(model, keras.optimizers.Adam())
        model.compile(optimizer, loss="mse")

    Gives every rank rank 0's weights and optimizer state, and binds the optimizer: `stateless_apply`, which `fit` calls
    in its compiled step, and `apply` first exchange all gradients, then clip, unscale and update. Collective, and so is
    every step. A model that is not built yet gets rank 0's weights when the optimizer is built for it: before the first
    step of `fit`.

    The weights are what `model.weights` lists. The state of random generators and metrics stays each rank's own;
    `evaluate` returns this rank's metrics, and `MetricAverageCallback` averages them.

    Args:
        model: of Keras 3, built in the same way on every rank, or not at all.
        optimizer: of Keras 3, not distributed; default: the one that the model was compiled with. For a model of the
            policy mixed_float16 it is put into a LossScaleOptimizer, as `compile` does.
        strategy: a strategy line ("accumulate=4"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        elastic: for jobs whose ranks join and leave (`unidist launch --min-np`). True, or a `ud.elastic.Policy`: each
            step of `fit` is a transaction, and data of `ud.shard((x, y), batch_size=...)` is redistributed, see
            docs/elastic.md. False: nothing. Default: True if the data is such, and no `ud.elastic.run` leads the
            training. In other jobs it changes nothing.
        op: Average, or Sum: gradients are added up over the ranks, for losses that are sums over samples.

    Returns:
        The model and the optimizer to use from now on: the same objects, but for a LossScaleOptimizer.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other, or Keras on JAX; `keras.distribution` is
            active; `zero` in an elastic job.
        NotInitializedError: `init()` was not called.
        UsageError: no optimizer, or one that is distributed already.
    """
    plan = context.current().plan_for(strategy)
    if elastic:
        passes_of_step(plan)
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is None:
        raise UsageError("distribute(model) needs an optimizer: pass it, or call model.compile before")
    distribution = KerasDistribution(model, chosen, plan)
    distribution.bind(average=averages(op))
    bound = distribution.optimizer
    runtime = context.current()
    # A worker that joins an elastic job begins alone, in a world of size one; later it must exchange as the others do.
    exchanges = runtime.topology.world_size > 1 or runtime.is_elastic
    if exchanges and not plan.steps_alone:
        overlap_backward(model)
    if exchanges and weights_samples(plan, average=averages(op)):
        weigh_batches(model, bound)
    if exchanges and not plan.steps_alone:
        share_statistics(model, bound)
    _check_each_step(model)
    if context.current().is_elastic:  # ranks that join later could not compare their data
        ElasticFit(model, bound, plan, elastic)
    else:
        warn_in_fit(model, fingerprint)
        if runtime.topology.world_size > 1:
            check = replica_check(runtime, plan, lambda: trained_pieces(model), more=lambda: hyperparameters(bound))
            whole = plan.shards_updates is None
            agree_in_fit(model, bound, check, is_whole=whole, bring_up_to_date=model.jax_state_sync)
    if getattr(model, "optimizer", None) is not None and optimizer is None:
        model.optimizer = bound
    return model, bound


class KerasDistribution(Distribution):
    """Distributes a model of Keras 3 on JAX. While a step runs, a rank's variables are not at rest."""

    framework = JaxFramework()
    is_at_rest = False

    @override
    def check(self, *, keeps_division: bool) -> None:
        check_can_distribute()
        check_plain(self.optimizer)
        _check_plan(self.plan)

    @override
    def bind_optimizer(self, update: Update) -> None:
        if self.model.dtype_policy.name == "mixed_float16":
            self.optimizer = _scaling_loss(self.optimizer)
        bind(self.optimizer, update)._unidist.model = self.model

    @override
    def pieces(self) -> Sequence[Piece]:
        return trained_pieces(self.model)

    @override
    def make_equal(self, *, is_new: bool) -> None:
        if self.runtime.topology.world_size > 1 or self.optimizer._unidist.distributed_update.inner_steps is not None:
            _share_values(self.model, self.optimizer)


def _check_each_step(model: Any) -> None:
    """Let `fit` and `train_on_batch` raise unidist's error where a step has failed; see `raise_failure`."""
    plain, train_on_batch = model.make_train_function, model.train_on_batch

    def make_train_function(force: bool = False) -> None:
        flush()
        take_failure()  # of programs that the script has called before
        before = model.train_function
        plain(force)
        train = model.train_function
        if train is before:
            return

        def checked(state: Any, iterator: Any) -> Any:
            raise_failure()
            return train(state, iterator)

        model.train_function = checked

    @functools.wraps(train_on_batch)
    def checked_batch(*args: Any, **options: Any) -> Any:
        result = train_on_batch(*args, **options)
        raise_failure(wait=True)
        return result

    model.make_train_function, model.train_on_batch = make_train_function, checked_batch


def _check_plan(plan: Plan) -> None:
    """Raise ConfigurationError if the plan has a strategy that Keras on JAX cannot use."""
    for item in plan.strategies:
        if item.changes_model or item.axis in plan.model_axes:
            raise ConfigurationError(
                f"strategy {item.name!r} changes the model, which is not possible with Keras on JAX; choices: data, "
                "accumulate, clip_norm, clip_value, zero=1, zero=2. KERAS_BACKEND=tensorflow has more of them"
            )
    if plan.chooses_precision is not None:
        raise ConfigurationError(
            "strategy 'precision' does not work with Keras on JAX; give the model a policy instead: "
            'keras.config.set_dtype_policy("mixed_bfloat16")'
        )
    if context.current().is_elastic and plan.shards_updates is not None:
        raise ConfigurationError(
            "this job is elastic, and strategy 'zero' is not elastic with Keras on JAX: with a rank its shard would be "
            "lost. Leave zero out, launch without --min-np, --max-np and --host-discovery-script, or set "
            "KERAS_BACKEND=tensorflow"
        )
    check_leaves_loop(plan)


def _scaling_loss(optimizer: Any) -> Any:
    """Return the optimizer in a LossScaleOptimizer, as `compile` would put it for mixed_float16."""
    if scales_loss(optimizer):
        return optimizer
    return keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")


def _share_values(model: Any, optimizer: Any) -> None:
    """Give all ranks the same values of existing variables now, or of all when they are made. Collective."""
    binding: Binding = optimizer._unidist
    is_loaded = binding.built_anywhere()  # perhaps on rank 0 only
    if is_loaded and binding.inner.sharded:
        raise UsageError(
            "this optimizer has state already, and zero shards it as it is made: distribute an optimizer that was not "
            "built, or leave zero out"
        )
    if is_loaded and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            binding.build(model.trainable_variables)
    binding.broadcast_when_built(lambda: [*model.weights, *optimizer.variables])
    if model.built and all(layer.built for layer in model._flatten_layers()):
        binding.broadcast_initial()


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    num_groups: int = 0,
    groups: Groups = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the optimizer, bound so that its steps use gradients reduced over all ranks.

    Unlike `distribute` it copies nothing to other ranks: use `BroadcastGlobalVariablesCallback`.

    Args:
        optimizer: of Keras 3; the same object is returned, of a subclass of its class. Under the global policy
            mixed_float16 it is put into a LossScaleOptimizer first, which `compile` would else put around it.
        name: replaces the optimizer's name.
        device_dense: for Horovod's sake: gradients are exchanged from host memory, wherever they are.
        device_sparse: the same.
        compression: how gradients travel: a member of `Compression`, the name of a registered compressor with its
            options, or a `unidist.gradients.compression.GradientCompressor`. Default: as `--strategy data:compression=`
            says.
        sparse_as_dense: for Horovod's sake: all gradients of JAX are dense.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and the sum is multiplied by
            it over the number of ranks.
        op: Average or Sum.
        num_groups: deprecated; use `groups`.
        groups: gradients of one group travel together: a number of groups, or a list of lists of variables, of which
            those that are not the optimizer's are left out.
        backward_passes_per_step: steps that make one update; their gradients are added up. In between nothing changes,
            `iterations` included.
        average_aggregated_gradients: the mean over those passes instead of their sum.
        process_set: gradients are reduced over its ranks. A rank outside of it calls this too, and steps alone.
        scale_local_gradients: divide gradients of local variables (`register_local_var`) by the number of ranks.

    Raises:
        ValueError: arguments that Horovod refuses.
        ConfigurationError: at the first update: the ranks' variables or arguments differ.
    """
    del device_dense, device_sparse
    runtime = context.current()
    check_can_distribute()
    check_plain(optimizer)
    check_passes(backward_passes_per_step)
    check_counts_alone(runtime, backward_passes_per_step)
    check_leaves_model(runtime.plan, "DistributedOptimizer")
    check_unsharded(runtime.plan, "DistributedOptimizer")
    _check_plan(runtime.plan)
    arguments = OptimizerArguments(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    options = _exchange_options(runtime, arguments)
    accumulation = None
    if backward_passes_per_step != 1:
        accumulation = Accumulation(backward_passes_per_step, average_aggregated_gradients)
    if keras.config.dtype_policy().name == "mixed_float16":
        optimizer = _scaling_loss(optimizer)
    if name is not None:
        optimizer.name = name
    update = planned_update(
        runtime, runtime.plan, JaxFramework(), accumulation=accumulation, average=op != Sum, options=options
    )
    bound = bind(optimizer, update)
    bound._unidist.scale_local = scale_local_gradients
    bound._unidist.groups = listed_groups(groups)
    return bound


def PartialDistributedOptimizer(  # noqa: D417, N802 - Horovod's name and arguments
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Return a DistributedOptimizer that leaves out some layers: every rank trains its own.

    Args:
        optimizer: see `DistributedOptimizer`, as all further arguments.
        local_layers: one layer or several, built.
    """
    variables = local_variables(local_layers, (keras.layers.Layer,))
    bound = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        bound.register_local_var(variable)
    return bound


def _exchange_options(runtime: context.Context, arguments: OptimizerArguments) -> ExchangeOptions:
    """Check Horovod's arguments, and return them as options; groups of variables are left to the binding."""
    op = Op(arguments.op)
    if op not in (Average, Sum):
        raise ValueError(f"op={op.name}: gradients of Keras optimizers are reduced by Average or Sum")
    registry = runtime.plugins.compressors
    members = {
        Compression.none: None,
        Compression.fp16: bucket_compressor("fp16", registry, members={}, otherwise=_no_compressor),
        Compression.bf16: bucket_compressor("bf16", registry, members={}, otherwise=_no_compressor),
    }
    compressor = bucket_compressor(arguments.compression, registry, members=members, otherwise=_no_compressor)
    options = arguments.exchange_options(runtime, compressor=compressor, position=_check_member)
    return options if isinstance(options.groups, int) else replace(options, groups=None)


def _no_compressor(compression: Any) -> GradientCompressor:
    raise ValueError(
        f"compression={compression!r}: give a member of Compression, the name of a compressor, or a GradientCompressor"
    )


def _check_member(member: Any) -> int | None:
    if not isinstance(member, keras.Variable):
        raise ValueError(f"groups must consist of variables, not {type(member).__name__}")
    return None
