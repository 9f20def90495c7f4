"""The two ways to make training distributed: `distribute(model, optimizer)` and Horovod's `DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from unidist.checkpoint.format.pieces import Piece
from unidist.errors import ConfigurationError, UsageError
from unidist.horovod_api.arguments import Groups, OptimizerArguments, check_passes
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.optim.accumulation import Accumulation
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.strategy.interface import Plan
from unidist.strategy.plan import StrategyLike
from unidist.training.binding import averages, check_counts_alone, check_leaves_loop, check_leaves_model, planned_update
from unidist.training.distribution import Distribution
from unidist.verification import FirstBatchCheck, replica_check
from unidist_torch.framework import TorchFramework
from unidist_torch.gradients.compression import CompressionLike, compressor_of, tensor_compressor
from unidist_torch.models.compiled_model import forget_compiled, leave_uncompiled, uncompiled
from unidist_torch.models.lazy_init import prepare_deferred, refuse_deferred
from unidist_torch.models.model_buffers import BufferRule, check_buffer_rule
from unidist_torch.models.plain_files import refuse_files
from unidist_torch.operations import Adasum, Average, Op, Sum
from unidist_torch.operations.compression import Compression
from unidist_torch.operations.divided import divided_modules
from unidist_torch.operations.functions import broadcast_parameters, give_optimizer_state
from unidist_torch.optimizer.elementwise import needs_closure
from unidist_torch.optimizer.horovod_arguments import NamedParameters, names_of, position_in
from unidist_torch.optimizer.mixin import bind, check_plain
from unidist_torch.training.divided_model import FollowedModel, follow_model, prepare_to_divide
from unidist_torch.training.no_sync import add_no_sync
from unidist_torch.training.other_wrappers import refuse_wrapped, refuse_wrapping
from unidist_torch.training.verification import attach, output_check, pieces_of, rates_of, trained_pieces


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: StrategyLike = None,
    *,
    op: Op = Average,
    buffers: BufferRule = "mean",
) -> tuple[Any, Any]:
    """Distribute training over all ranks; the script keeps its loop, its model and its optimizer.

    Copies rank 0's parameters, buffers and optimizer state to all ranks, and binds the optimizer: gradients are
    exchanged while `backward` runs, and when it returns every `p.grad` holds the average over the ranks, ready to be
    clipped. Collective, and so is every backward pass that completes an update. Broadcasts no parameters later, but
    those of new layers that `add_param_group` brings.

    Args:
        model: built in the same way on every rank.
        optimizer: over the model's parameters.
        strategy: a strategy line ("accumulate=4"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.
        op: Average, or Sum: gradients are added up over the ranks, for losses that are sums over samples.
        buffers: what the model's persistent buffers are after each update, where training changes them (statistics
            of batch norm, codebooks): "mean" of the ranks' (rank 0's of those that are not of floating point),
            "rank0"'s, or each rank's "own". The same on every rank.

    Returns:
        The model and the optimizer to use from now on: the same objects, or what the strategies made of them.

    Raises:
        ConfigurationError: the strategies do not fit the world or each other; the ranks' models differ.
        NotInitializedError: `init()` was not called.
    """
    runtime = context.current()
    plan = runtime.plan_for(strategy)
    check_leaves_loop(plan)
    distribution = TorchDistribution(model, optimizer, plan, in_backward=True, buffers=buffers)
    distribution.bind(average=averages(op))
    return distribution.returned, optimizer


class TorchDistribution(Distribution):
    """Distributes a module.

    Args:
        model: the whole model, as the script made it.
        optimizer: over its parameters; after `bind` over those that this rank holds.
        plan: of the run.
        in_backward: see `Distribution`.
        buffers: see `distribute`.
    """

    framework = TorchFramework()

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        in_backward: bool,
        buffers: BufferRule = "mean",
    ) -> None:
        super().__init__(model, optimizer, plan)
        self.in_backward = in_backward
        self._buffers = buffers
        self._given = self._whole = model
        self._names: Mapping[str, torch.Tensor] = {}
        self._followed = FollowedModel()
        self._is_divided = bool(plan.model_axes)
        self._is_deferred = False

    @property
    def returned(self) -> torch.nn.Module:
        """The model for the script: what it gave, unless a strategy has made another one of it."""
        model: torch.nn.Module = self._given if self.model is self._whole else self.model
        return model

    @override
    def check(self, *, keeps_division: bool) -> None:
        model, optimizer, plan = self.model, self.optimizer, self.plan
        _check_model(model)
        check_plain(optimizer)
        check_buffer_rule(self._buffers)
        refuse_wrapped(model)
        if not keeps_division:
            _refuse_second(model, plan)
        _check_owned(optimizer, self.framework.parameters(model))
        self._is_deferred = prepare_deferred(model, plan)
        leave_uncompiled("unidist", "unidist_torch")
        if any(strategy.changes_model for strategy in plan.strategies):
            forget_compiled()
        if not any("sequence" in item.axis_divides and item.axis_size != 1 for item in plan.strategies):
            # Strategies change what `torch.compile` has wrapped; `context` refuses the wrapper.
            self.model = self._whole = uncompiled(model)
        if self._is_divided:
            _refuse_closure(optimizer, plan)

    @override
    def prepare_to_divide(self) -> None:
        prepare_to_divide(self.model, self.optimizer, self.runtime)

    @override
    def output_check(self, *, is_new: bool) -> FirstBatchCheck | None:
        return output_check(self._given, self.runtime, self.plan, deferred=self._is_deferred)

    @override
    def follow_division(self) -> None:
        model, plan = self.model, self.plan
        if plan.model_axes:
            divided_modules.update(model.modules())
        self._names = self.framework.parameters(model)
        if self._is_divided:
            self._followed = follow_model(self.optimizer, self._names, self.places)
        lacks_layers = self._is_divided and plan.runs_steps is not None
        refuse_files(model, self._followed.parts, plan.model_axes, lacks_layers=lacks_layers)

    @override
    def bind_optimizer(self, update: Update) -> None:
        followed = self._followed
        bound = bind(self.optimizer, update, names=self._names, cut=followed.parts, gathered=followed.gathered)
        bound._unidist.keep_buffers(self.model, self._buffers)
        bound._unidist.make_new_equal = _for_new_parameters(self._names.values(), self.plan)

    @override
    def finish_binding(self, update: Update) -> None:
        update.position.compare(update.communicator)  # made while all ranks make it
        if self.runtime.settings.verify.first:
            update.position.rates = rates_of(self.optimizer)
        add_no_sync(self.model, self.optimizer)
        refuse_wrapping(self.model)

    @override
    def pieces(self) -> Sequence[Piece]:
        return pieces_of(self.model)

    @override
    def compare_outputs(self, check: FirstBatchCheck) -> None:
        attach(check, self.model, runs_steps=self.plan.runs_steps is not None)

    @override
    def make_equal(self, *, is_new: bool) -> None:
        if self._is_divided:
            return
        if not self._is_deferred:  # then all ranks have the same values already
            broadcast_parameters(self.framework.model_state(self.model), root_rank=0)
        if self.runtime.topology.world_size > 1:
            give_optimizer_state(self.optimizer, root_rank=0)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters = None,
    compression: CompressionLike = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the optimizer, bound so that its `step` uses gradients reduced over all ranks. Collective.

    As in Horovod, gradients are complete after `optimizer.synchronize()`, which `step` calls where the script does
    not. Unlike `distribute` it copies nothing to other ranks: call `broadcast_parameters` and
    `broadcast_optimizer_state`, as Horovod's scripts do.

    Args:
        optimizer: any torch optimizer; the same object is returned, of a subclass of its class.
        named_parameters: names for messages; as `model.named_parameters()`, of all parameters or none.
        compression: how gradients travel: a member of `Compression`, the name of a registered compressor with its
            options ("powersgd/rank=2"), a `unidist.gradients.compression.GradientCompressor`, or a class with Horovod's
            `compress` and `decompress`. Default: as `--strategy data:compression=` says, else not at all.
        backward_passes_per_step: call `step` once after this many backward passes; their gradients are summed.
            (`--strategy accumulate=N` is for scripts that call `step` after every pass.)
        op: Average, Sum, or Adasum: the inner optimizer steps on this rank's own gradients, and the changes of the
            parameters are combined (https://arxiv.org/abs/2006.02924).
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and the sum is multiplied by
            it over the number of ranks: keeps sums of 16-bit gradients in range.
        num_groups: deprecated; use `groups`.
        groups: gradients of one group travel together, in one bucket: a number of groups, or a list of lists of
            parameters. The others are packed into buckets as usual, where Horovod sends each alone.
        sparse_as_dense: sparse gradients travel as dense ones, and are sparse again at the update.
        process_set: gradients are reduced over its ranks. A rank outside of it calls this too, and steps alone.

    Raises:
        ValueError: arguments that Horovod refuses.
        NotImplementedError: Adasum with a process set.
        ConfigurationError: the ranks' models or arguments differ.
    """
    runtime = context.current()
    check_plain(optimizer)
    op = Op(op)
    arguments = OptimizerArguments(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    options = arguments.exchange_options(
        runtime,
        compressor=compressor_of(compression, runtime.plugins.compressors),
        position=position_in(optimizer),
    )
    check_passes(backward_passes_per_step)
    refuse_deferred(parameter for group in optimizer.param_groups for parameter in group["params"])
    names = names_of(optimizer, named_parameters)
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"DistributedOptimizer computes Average, Sum or Adasum, not {Op(op).name}")
    if op is Adasum and runtime.topology.world_size > 1:
        if options.process_set is not None:
            raise NotImplementedError("op=Adasum within a process set is not supported, as in Horovod; leave one out")
        if runtime.settings.strategy:
            raise UsageError(
                f"op=Adasum exchanges no gradients, and --strategy {runtime.settings.strategy} is about them; "
                "leave one out"
            )
        from unidist_torch.training.adasum_optimizer import bind_adasum

        compressor = tensor_compressor(compression)
        return bind_adasum(optimizer, runtime, names=names, compression=compressor, passes=backward_passes_per_step)
    check_counts_alone(runtime, backward_passes_per_step)
    check_leaves_model(runtime.plan, "DistributedOptimizer")
    accumulation = None
    if backward_passes_per_step != 1:
        accumulation = Accumulation(passes=backward_passes_per_step, average=False, stepwise=False)
    framework = TorchFramework()
    update = planned_update(
        runtime, runtime.plan, framework, accumulation=accumulation, average=op is not Sum, options=options
    )
    bound = bind(optimizer, update, names=names)
    bound._unidist.is_horovods = True
    if options.process_set is None:
        check = replica_check(
            runtime, runtime.plan, lambda: trained_pieces(bound._unidist.names), warns=True, in_generations=True
        )
        if check is not None:
            update.follow(check)
    return bound


def _for_new_parameters(known: Iterable[torch.Tensor], plan: Plan) -> Callable[[Sequence[torch.Tensor]], None]:
    """Return what gives parameters that are not among these rank 0's values; see `Binding.make_new_equal`."""
    equal: Any = WeakIdKeyDictionary(dict.fromkeys(known, True))  # not by id, which a layer's successor may have
    lacks_layers = bool(plan.model_axes) and plan.runs_steps is not None

    def make_equal(parameters: Sequence[torch.Tensor]) -> None:
        new = [parameter for parameter in parameters if parameter not in equal]
        if new and lacks_layers:
            raise UsageError(
                f"add_param_group() was given {len(new)} parameters that rank {context.current().topology.rank} has "
                f"not got: {plan.model_axes[0]} has divided the model's layers over the ranks. Give those that "
                "model.parameters() or a layer's parameters() has now, none on ranks without the layer. A layer that "
                "is added now would be in no stage: add it before the model is distributed, and freeze it until then"
            )
        if new:
            broadcast_parameters(new, root_rank=0)
            equal.update(dict.fromkeys(new, True))

    return make_equal


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UsageError(f"a model of torch.nn is expected, not {found}. Give the model first, then the optimizer")


def _refuse_second(model: torch.nn.Module, plan: Plan) -> None:
    """Raise UsageError if the model is divided, and the plan would divide it once more."""
    if plan.model_axes and any(module in divided_modules for module in model.modules()):
        raise UsageError(
            f"this model ({type(model).__name__}), or a part of it, is distributed already, and with "
            f"{' and '.join(plan.model_axes)} parallelism a model takes one optimizer: call distribute() once, with "
            'one optimizer that has several parameter groups: AdamW([{"params": ..., "lr": ...}, {"params": ...}]). A '
            "framework that calls it for you (Lightning) calls it for each optimizer of configure_optimizers()"
        )


def _refuse_closure(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    if needs_closure(type(optimizer)):
        raise ConfigurationError(
            f"{type(optimizer).__name__} looks at all parameters at once, and with "
            f"{' and '.join(plan.model_axes)} parallelism each rank holds a part of them; use strategy data, or an "
            "optimizer that updates each parameter by itself (AdamW)"
        )


def _check_owned(optimizer: torch.optim.Optimizer, names: Any) -> None:
    owned = {id(tensor) for tensor in names.values()}
    strays = sum(id(parameter) not in owned for group in optimizer.param_groups for parameter in group["params"])
    if strays:
        raise UsageError(
            f"the optimizer has {strays} parameters that are not the model's. Create the optimizer after the model "
            "is final, from model.parameters(); for parameters of several models use DistributedOptimizer."
        )
