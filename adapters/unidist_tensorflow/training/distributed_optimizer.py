"""The ways to make training distributed: `distribute(model, optimizer)` and Horovod's `DistributedOptimizer`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from unidist.checkpoint.format.pieces import Piece
from unidist.elastic.divided_training import Divide
from unidist.elastic.step_training import Policy, passes_of_step
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.compression import GradientCompressor
from unidist.horovod_api.arguments import Groups, OptimizerArguments, check_passes
from unidist.horovod_api.reduce_ops import Op
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.optim.accumulation import Accumulation
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.strategy.interface import Plan
from unidist.strategy.plan import StrategyLike
from unidist.training.binding import averages, check_counts_alone, check_leaves_model, planned_update
from unidist.training.distribution import Distribution
from unidist.verification import FirstBatchCheck, replica_check
from unidist_keras.arguments import check_unsharded, listed_groups
from unidist_keras.checkpoint import trained_pieces
from unidist_keras.fit_agreement import agree_in_fit, hyperparameters
from unidist_keras.losses.weight import weigh_batches, weights_samples
from unidist_keras.mixin import check_plain, scales_loss
from unidist_keras.running_statistics import share_statistics
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.keras_api import is_legacy_optimizer, is_old
from unidist_tensorflow.operations.compression import Compression
from unidist_tensorflow.operations.functions import broadcast_variables
from unidist_tensorflow.optimizer.arguments import CompressionLike, exchange_options
from unidist_tensorflow.optimizer.binding import Binding
from unidist_tensorflow.optimizer.legacy import bind_legacy, check_legacy
from unidist_tensorflow.optimizer.mixin import bind
from unidist_tensorflow.optimizer.pairs import PairReduction
from unidist_tensorflow.optimizer.preconditions import check_can_distribute
from unidist_tensorflow.training.divided_model import prepare_to_divide, variables_to_gather
from unidist_tensorflow.training.divided_training import DividedTraining
from unidist_tensorflow.training.elastic_fit import ElasticFit
from unidist_tensorflow.training.lazy_init import check_deferred
from unidist_tensorflow.training.step_runner import StepRunner, failures_as_they_were
from unidist_tensorflow.training.synchronized_norm import synchronize
from unidist_tensorflow.training.unsharded_data import warn_in_fit
from unidist_tensorflow.training.verification import attach, output_check
from unidist_tensorflow.training.waiting import measure_fit

_DIVIDED = "_unidist_divided_training"


def distribute(
    model: Any,
    optimizer: Any = None,
    strategy: StrategyLike = None,
    *,
    elastic: bool | Policy | None = None,
    op: Op = Op.Average,
) -> tuple[Any, Any]:
    """Distribute training over all ranks, for `model.fit` and for custom training loops.

        model, optimizer = ud.distribute(model, keras.optimizers.Adam())
        model.compile(optimizer, loss="mse")

    Gives every rank rank 0's weights and optimizer state, and binds the optimizer: `apply` (`apply_gradients`, `fit`)
    first exchanges all gradients, then clips, unscales and updates. Collective, and so is every `apply`. A model that
    is not built yet gets rank 0's weights when it is: before its first step in `fit` and in `tf.function`, and in an
    eager custom loop with the first `apply` (whose gradients come from the rank's own weights).

    The weights are what `model.weights` lists. The state of random generators and metrics stays each rank's own;
    `evaluate` returns this rank's metrics, and `MetricAverageCallback` averages them.

    Args:
        model: of Keras 3, built in the same way on every rank, or not at all.
        optimizer: of Keras 3, not distributed; default: the one that the model was compiled with. For a model of the
            policy mixed_float16 it is put into a LossScaleOptimizer, as `compile` does.
        strategy: a strategy line ("accumulate=4"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        elastic: for jobs whose ranks join and leave (`unidist launch --min-np`). True, or a `ud.elastic.Policy`: each
            step of `fit` is a transaction, and data of `ud.shard(dataset, batch_size=...)` is redistributed, see
            docs/elastic.md. False: nothing. Default: True if the data is such, and no `ud.elastic.run` leads the
            training. In other jobs it changes nothing.
        op: Average, or Sum: gradients are added up over the ranks, for losses that are sums over samples.

    Returns:
        The model and the optimizer to use from now on: the same objects, or what the strategies made of them.

    Raises:
        ConfigurationError: the strategies do not fit the world or each other; something else distributes too.
        NotInitializedError: `init()` was not called.
        UsageError: no optimizer, one that is distributed already, or a model compiled with jit_compile=True.
    """
    runtime = context.current()
    plan = runtime.plan_for(strategy)
    keeps_division = runtime.is_elastic and plan.divides_model
    if elastic:
        passes_of_step(plan, keeps_division=True)
    chosen = _chosen_optimizer(model, optimizer)
    if keeps_division and elastic is False:
        raise ConfigurationError(
            "this job is elastic, and strategies divide the model: distribute(elastic=False) cannot go on when ranks "
            "change. Leave elastic= out"
        )
    if keeps_division:
        model, bound = _bind_divided(model, chosen, strategy, average=averages(op))
    else:
        distribution = KerasDistribution(model, chosen, plan)
        distribution.bind(average=averages(op))
        model, bound = distribution.model, distribution.optimizer
    if getattr(model, "optimizer", None) is not None and optimizer is None:
        model.optimizer = bound
    # A worker that joins an elastic job begins alone, in a world of size one; later it must exchange as the others do.
    exchanges = runtime.topology.world_size > 1 or runtime.is_elastic
    if exchanges and weights_samples(plan, average=averages(op)):
        weigh_batches(model, bound)
    if exchanges and not plan.steps_alone:
        share_statistics(model, bound, prepare=lambda: synchronize(model))
    runs = plan.runs_steps
    if runs is None:
        _prepare_fit(model, bound)
    else:
        runner = runs.step_runner(TensorFlowFramework(), context.current())(model, None, bound)
        assert isinstance(runner, StepRunner), f"{type(runner).__qualname__} is no runner of Keras models"
        runner.prepare_fit()
    if runtime.is_elastic:
        ElasticFit(
            model,
            bound,
            plan,
            elastic,
            prepare=lambda inputs: None if keeps_division else build_on_all_ranks(model, bound, inputs),
        )
    else:
        _raise_own_errors(model)
        measure_fit(model)
        warn_in_fit(model)
        if runtime.topology.world_size > 1:
            check = replica_check(runtime, plan, lambda: trained_pieces(model), more=lambda: hyperparameters(bound))
            agree_in_fit(model, bound, check, is_whole=not plan.dividers and plan.shards_updates is None)
    return model, bound


def _chosen_optimizer(model: Any, optimizer: Any) -> Any:
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is None:
        raise UsageError("distribute(model) needs an optimizer: pass it, or call model.compile before")
    return chosen


def _bind_divided(model: Any, optimizer: Any, strategy: StrategyLike, *, average: bool) -> tuple[Any, Any]:
    """Divide a model of an elastic job, on this rank maybe later; returns both, as this rank has them. Collective."""

    def bind_by(plan: Plan, divide: Divide | None) -> Any:
        distribution = KerasDistribution(model, optimizer, plan)
        distribution.bind(average=average, keeps_division=True, divide=divide)
        return distribution.model

    divided = DividedTraining(model, optimizer, strategy, bind_by)
    divided.model.__dict__[_DIVIDED] = divided  # which generations refer to weakly
    return divided.model, optimizer


class KerasDistribution(Distribution):
    """Distributes a model of Keras 3. While a graph runs, a rank's variables are not at rest."""

    framework = TensorFlowFramework()
    is_at_rest = False

    @override
    def check(self, *, keeps_division: bool) -> None:
        check_can_distribute()
        check_plain(self.optimizer)
        check_deferred(self.model, self.plan)

    @override
    def prepare_to_divide(self) -> None:
        prepare_to_divide(self.model, self.optimizer, self.runtime)

    @override
    def output_check(self, *, is_new: bool) -> FirstBatchCheck | None:
        return output_check(self.model, self.runtime, self.plan) if is_new else None

    @override
    def bind_optimizer(self, update: Update) -> None:
        divided = bool(self.plan.model_axes)
        policy = self.model.dtype_policy.name
        if policy == "mixed_float16" and not scales_loss(self.optimizer) and update.scaler is None:
            if divided:
                raise UsageError(
                    "a LossScaleOptimizer of Keras sees this rank's part of a divided model only: build the model in "
                    "float32 and use --strategy precision=fp16, by which all ranks skip a step together"
                )
            self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer, name="loss_scale_optimizer")
        gathered = variables_to_gather(self.model, self.optimizer) if divided else []
        bind(self.optimizer, update, gathered=gathered)
        synchronize(self.model)

    @override
    def pieces(self) -> Sequence[Piece]:
        return trained_pieces(self.model)

    @override
    def compare_outputs(self, check: FirstBatchCheck) -> None:
        attach(check, self.model)

    @override
    def make_equal(self, *, is_new: bool) -> None:
        model, binding = self.model, self.optimizer._unidist
        binding.belongs_to(lambda: model.trainable_variables)
        if self.plan.model_axes:
            if not is_new:
                binding.build_to_load()
            binding.build_early(model.trainable_variables)
        elif self.runtime.topology.world_size > 1:
            _share_values(model, binding)


def _share_values(model: Any, binding: Binding) -> None:
    """Give all ranks the same values of existing variables now, and of later ones when they are made. Collective."""

    def variables() -> list[Any]:
        return binding.inner.equal_everywhere(model)

    binding.broadcast_when_built(variables)
    if not model.built:
        return
    is_complete = _is_built(model) or binding.built_anywhere()  # an optimizer is built for all that there will be
    if is_complete:
        binding.build_early(model.trainable_variables)
    binding.broadcast_initial()
    if not is_complete:  # the first forward pass makes the rest, or never calls it
        binding.broadcast_when_built(variables)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Op.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the optimizer, bound so that `apply` uses gradients reduced over all ranks.

    Unlike `distribute` it copies nothing to other ranks: use `BroadcastGlobalVariablesCallback` or
    `broadcast_variables`, as Horovod's scripts do.

    Args:
        optimizer: of Keras 3 or tf_keras; the same object is returned, of a subclass of its class. Under the global
            policy mixed_float16 it is put into a LossScaleOptimizer first, which `compile` would else put around it.
        name: replaces the optimizer's name.
        device_dense: for Horovod's sake: gradients are exchanged from host memory, wherever they are.
        device_sparse: the same.
        compression: how gradients travel: a member of `Compression`, a class with its interface, the name of a
            registered compressor with its options, or a `unidist.gradients.compression.GradientCompressor`. Default:
            as `--strategy data:compression=` says.
        sparse_as_dense: IndexedSlices are added up to dense gradients by the exchange. Without, those of all ranks are
            gathered, as Horovod does: what one process would have on all samples.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and the sum is multiplied by
            it over the number of ranks.
        op: Average or Sum.
        backward_passes_per_step: calls of `apply` (tf_keras: `apply_gradients`) that make one update; their gradients
            are added up. In between no weight changes. `iterations` of tf_keras counts every call, as under Horovod;
            that of Keras 3, which Horovod does not take, counts updates.
        average_aggregated_gradients: the mean over those passes instead of their sum.
        num_groups: deprecated; use `groups`.
        groups: gradients of one group travel together: a number of groups, or a list of lists of variables, of which
            those that are not the optimizer's are left out.
        process_set: gradients are reduced over its ranks. A rank outside of it calls this too, and steps alone.
        scale_local_gradients: divide gradients of local variables (`register_local_var`) by the number of ranks.

    Raises:
        ValueError: arguments that Horovod refuses.
        ConfigurationError: at the first update: the ranks' variables or arguments differ.
    """
    del device_dense, device_sparse
    arguments = OptimizerArguments(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        name=name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        scale_local_gradients=scale_local_gradients,
    )
    return distribute_optimizer(optimizer, arguments)


def distribute_optimizer(optimizer: Any, arguments: OptimizerArguments) -> Any:
    """Do what `DistributedOptimizer` does, for any facade; see there.

    Raises:
        ValueError: arguments that Horovod refuses.
    """
    runtime = context.current()
    check_can_distribute()
    legacy = is_legacy_optimizer(optimizer)
    if legacy:
        check_legacy(optimizer)
    else:
        check_plain(optimizer)
    passes = arguments.backward_passes_per_step
    check_passes(passes)
    options = exchange_options(runtime, arguments)
    check_counts_alone(runtime, passes)
    check_leaves_model(runtime.plan, "DistributedOptimizer")
    check_unsharded(runtime.plan, "DistributedOptimizer")
    accumulation = None
    if passes != 1:
        accumulation = Accumulation(passes, arguments.average_aggregated_gradients)
    optimizer = _scaling_loss(optimizer)
    if arguments.name is not None:
        setattr(optimizer, "_name" if legacy and is_old(optimizer) else "name", arguments.name)
    average = arguments.op is not Op.Sum
    update = planned_update(
        runtime, runtime.plan, TensorFlowFramework(), accumulation=accumulation, average=average, options=options
    )
    bound = bind_legacy(optimizer, update) if legacy else bind(optimizer, update)
    bound._unidist.scale_local = arguments.scale_local_gradients
    bound._unidist.groups = listed_groups(arguments.groups)
    if legacy:
        bound._unidist.counts_passes = passes != 1
    if legacy and not isinstance(arguments.compression, str | GradientCompressor):
        bound._unidist.reduction = PairReduction(
            scale_local=arguments.scale_local_gradients,
            sparse_as_dense=arguments.sparse_as_dense,
            predivide_factor=arguments.gradient_predivide_factor,
            compression=arguments.compression,
            op=arguments.op,
            process_set=arguments.process_set,
        )
    return bound


def _scaling_loss(optimizer: Any) -> Any:
    """Return the optimizer; under the global policy mixed_float16, in a LossScaleOptimizer, as `compile` would."""
    if is_legacy_optimizer(optimizer):
        precision = sys.modules["tf_keras"].mixed_precision
        scales = isinstance(optimizer, precision.LossScaleOptimizer)
        if precision.global_policy().name == "mixed_float16" and not scales:
            return precision.LossScaleOptimizer(optimizer)
    elif keras.config.dtype_policy().name == "mixed_float16" and not scales_loss(optimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
    return optimizer


def _prepare_fit(model: Any, optimizer: Any) -> None:
    """Let `fit` and `train_on_batch` give all ranks the same weights before the first step, and refuse XLA."""
    _check_not_compiled_by_xla(model)
    plain = model.train_step

    def train_step(data: Any) -> Any:  # runs for each batch in eager mode, else when it is traced
        _check_not_compiled_by_xla(model)
        build_on_all_ranks(model, optimizer, keras.utils.unpack_x_y_sample_weight(data)[0])
        return plain(data)

    model.train_step = train_step


def _raise_own_errors(model: Any) -> None:
    """Let `fit` raise unidist's errors, and not those of the graph in which they happened."""
    plain = model.fit

    @functools.wraps(plain)
    def fit(*args: Any, **options: Any) -> Any:
        with failures_as_they_were():
            return plain(*args, **options)

    model.fit = fit


def build_on_all_ranks(model: Any, optimizer: Any, inputs: Any) -> None:
    """Make the model's variables, if it has none yet, with the same values on all ranks. Collective, the first time.

    Args:
        model: of `optimizer`.
        optimizer: bound.
        inputs: for which the model is built.
    """
    if not _is_built(model):
        _build_model(model, inputs)
    optimizer._unidist.broadcast_initial()


def _is_built(model: Any) -> bool:
    """Return whether the model has all its variables.

    Keras' default `build` says that a model with a weight outside of its layers is built, and leaves its layers as
    they are.
    """
    return model.built and all(layer.built for layer in model._flatten_layers())


def _build_model(model: Any, inputs: Any) -> None:
    """Make the model's variables, with values at once, also while a function is being traced.

    Those that a call in a function makes have no values before the function's first run.
    """
    if not all(
        isinstance(each, tf.Tensor | tf.TensorSpec) for each in tf.nest.flatten(inputs)
    ):  # ragged, sparse: no symbol for them
        model(inputs, training=False)
        return
    with tf.init_scope():
        model(tf.nest.map_structure(lambda each: keras.KerasTensor(each.shape, each.dtype.name), inputs))


def _check_not_compiled_by_xla(model: Any) -> None:
    if getattr(model, "jit_compile", False):
        raise UsageError(
            "the model is compiled with jit_compile=True: what XLA compiles cannot exchange gradients with other "
            "processes. Use model.compile(..., jit_compile=False)"
        )


__all__ = ["DistributedOptimizer", "broadcast_variables", "distribute"]
