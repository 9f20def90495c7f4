"""The inner step of a torch optimizer whose updates are sharded over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist.buffer import HOST, DType
from unidist.errors import ConfigurationError, UsageError
from unidist.optim.update import Update
from unidist_torch.gradients.placeholder import sharded_gradient
from unidist_torch.memory import memory_kind
from unidist_torch.models import leave_uncompiled, plain_use
from unidist_torch.optimizer.elementwise import needs_whole_tensors
from unidist_torch.optimizer.inner_step import InnerStep, refuse_scaler
from unidist_torch.optimizer.narrow_step import NarrowStep, SteppedTensor
from unidist_zero._torch.checkpoint import ShardedOptimizerState
from unidist_zero._torch.inner_optimizer import InnerOptimizer
from unidist_zero._torch.parameters import stage3
from unidist_zero._torch.parameters.memory import FlatParameterMemory, ParameterMemory, SharedPagesMemory, UnitMemory
from unidist_zero._torch.parameters.offload import make_state_memory, refuse_device_steps
from unidist_zero._torch.parameters.shared_pages import PagedModel
from unidist_zero._torch.parameters.stage3 import ShardedModel, sharded_model_of
from unidist_zero._torch.segments import SegmentTensor, lay_out_by_dims
from unidist_zero._torch.shards import ParameterShard
from unidist_zero._torch.state import adopt, keep_types, whole_state_dict
from unidist_zero.binding import ZeroBinding
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
from unidist_zero.sharding.shared_pages import may_share

if TYPE_CHECKING:
    from unidist.checkpoint.format.interface import KeepsState
    from unidist.checkpoint.format.pieces import Placement
    from unidist.optim.interface import MakesInnerStep
    from unidist.runtime_api import RuntimeAPI
    from unidist_zero.strategy import Zero


class TorchZero(ZeroBinding):
    """See `ZeroBinding`."""

    @override
    def inner_step(self, strategy: Zero) -> MakesInnerStep:
        def make(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], update: Update) -> InnerStep:
            return ShardedStep(strategy, optimizer, plain, update)

        return make

    def partition(self, strategy: Zero, model: torch.nn.Module, context: RuntimeAPI) -> torch.nn.Module:
        """Prepare a model for stage 3. Collective over the data axis when first called."""
        leave_uncompiled("unidist_zero")
        lay_out_by_dims(model.parameters())
        kinds = {memory_kind(parameter) for parameter in model.parameters()}
        if strategy.shares_pages(context, kinds):
            return stage3.prepare_pages(model, context)
        patterns = None if strategy.units is None else strategy.units.split("+")
        return stage3.prepare_units(model, patterns, num_ahead=1 if strategy.prefetch is None else strategy.prefetch)

    @override
    def attach(self, strategy: Zero, model: torch.nn.Module, update: Update) -> None:
        """See `ZeroBinding.attach`: initializes a model that was built without memory. Collective."""
        parameters = list(model.parameters())
        sharded = sharded_model_of(parameters)
        if isinstance(sharded, ShardedModel):
            sharded.initialize()
            return
        exchange = update.exchanges[0]
        assert isinstance(exchange, ReduceScatterExchange)
        sharded.add_frozen(parameters, exchange.shard_groups[HOST])


class ShardedStep(InnerStep):
    """Each rank steps on its shard, and gathers the shards of the others.

    Args:
        strategy: the options.
        optimizer: the bound optimizer. Until the first update its own `state`, if it has any, is that of whole
            parameters; then each rank moves its shard of it to segments, and it is empty.
        plain: its class before it was bound.
        update: the framework-free side. Its options are changed before its first exchange is made.
    """

    sharded = True

    def __init__(
        self, strategy: Zero, optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], update: Update
    ) -> None:
        passes = update.accumulation
        if strategy.stage > 1 and passes.passes > 1 and not passes.stepwise:
            raise ConfigurationError(
                f"backward_passes_per_step={passes.passes} and zero={strategy.stage}, which reduces every pass by "
                f"itself: use --strategy zero={strategy.stage},accumulate={passes.passes}, or zero=1"
            )
        detected = needs_whole_tensors(optimizer, plain)  # refuses what cannot be sharded at all
        update.options = replace(
            update.options, whole_tensors=detected if strategy.whole == "auto" else strategy.whole == "true"
        )
        if strategy.stage < 3 and not update.options.whole_tensors:
            lay_out_by_dims(_listed(optimizer))
        self._model = sharded_model_of(_listed(optimizer)) if strategy.stage == 3 else None
        self._units = self._model if isinstance(self._model, ShardedModel) else None
        if self._units is not None:
            self._units.rebind(update.context)
        self._strategy = strategy
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._offload = make_state_memory(strategy.offload)
        if self._offload is not None:
            self._offload.check(_listed(optimizer))
            refuse_device_steps(optimizer.param_groups, self._offload)
        if self._units is not None:
            self._units.offload = self._offload
        narrow = NarrowStep.wanted(update.options.precision, plain)
        self._inner = InnerOptimizer(optimizer, plain, self._offload, narrow)
        self._shards: list[ParameterShard] = []
        self._parameters: Sequence[torch.Tensor] = ()
        self._present: list[bool] = []
        self._is_fresh = True  # no update has been made
        self._is_lost = update.step > 0  # in another generation of an elastic job there was state

    @property
    @override
    def keeps_parameters(self) -> bool:
        return self._model is None and self._strategy.offload is None and self._update.options.precision is None

    @override
    def before_agreement(self) -> None:
        """See `InnerStep.before_agreement`: at stage 3 buckets are made of units."""
        if self._units is not None:
            groups = self._units.groups(_listed(self._optimizer))
            self._update.options = replace(self._update.options, groups=groups)

    @override
    def parameters_changed(
        self, parameters: Sequence[torch.Tensor], first: int, views: Sequence[torch.Tensor | None]
    ) -> None:
        """See `InnerStep.parameters_changed`: new parameters move to flat memory."""
        self._parameters = list(parameters)
        self._present += [False] * (len(parameters) - len(self._present))
        if first and self._strategy.whole == "auto" and not self._update.options.whole_tensors:
            self._check_new()
        begin = 0
        for number, exchange in enumerate(self._update.exchanges):
            end = begin + len(exchange.parameters)
            if number >= len(self._shards):
                assert isinstance(exchange, ReduceScatterExchange)
                shard = self._make_shard(exchange, self._parameters[begin:end])
                if not self._is_fresh:  # it was frozen, and may have state of an earlier time
                    shard.segments = adopt(self._optimizer, shard, self._inner)
                self._shards.append(shard)
            begin = end
        if isinstance(self._model, PagedModel):
            self._model.note_trained(self._parameters)
        if self._units is not None and not first:
            self._units.add_untrained(self._update)
        self._inner.set_segments(self._segments())

    @override
    def take(self, first: int, present: Sequence[bool | None]) -> None:
        """See `InnerStep.take`: the gradients are where this rank's segments look for them."""
        with plain_use():
            for index, is_present in enumerate(present, start=first):
                self._present[index] = bool(is_present)
                parameter = self._parameters[index]
                parameter.grad = sharded_gradient(parameter) if is_present else None

    @override
    def step(self, grad_scaler: Any) -> Any:
        refuse_scaler(grad_scaler, self._strategy.name)
        if self._is_lost:
            raise UsageError(
                "each rank has only a shard of the state of this optimizer, and the shards were not brought together "
                "again after the ranks of the job changed: give the optimizer to the elastic state, TorchState(model, "
                "optimizer), and use it inside of the elastic function"
            )
        self._prepare()
        self._inner.before_step()
        if isinstance(self._model, PagedModel):
            self._model.publish_writes()
        begin = 0
        groups = self._groups()
        stepped: list[SteppedTensor] = []
        fetched: list[tuple[SegmentTensor, float]] = []
        for shard in self._shards:
            # What the script has taken out of its optimizer's groups is left alone.
            present = [
                is_present and id(parameter) in groups
                for parameter, is_present in zip(shard.parameters, self._present[begin:], strict=False)
            ]
            shard.memory.before_step()
            if self._split(shard, present, groups):
                self._inner.set_segments(self._segments())
            for segment in shard.segments:
                is_stepped = present[segment.pieces[0].parameter]
                segment.fetch(gradient=is_stepped)
                if is_stepped:
                    fetched.append((segment, shard.exchange.pending_factor))
                    stepped.append(segment.stepped(begin))
            begin += len(shard.parameters)
        for segment in self._segments():
            segment.follow_parameters()
        for segment, factor in fetched:
            segment.set_gradient(factor)
        result = self._inner.step(stepped, self._update.step)
        with torch.no_grad():
            for segment in self._segments():
                segment.leaf.grad = None
                segment.write_back()
        # All shards are in flight before the first is waited for: engines with several threads move several at once.
        for shard in self._shards:
            shard.memory.start_gather()
        for shard in self._shards:
            shard.memory.finish_gather()
        self._inner.after_step()
        self.skip()
        return result

    @override
    def skip(self) -> None:
        with plain_use():
            for parameter in self._parameters:
                parameter.grad = None
        for shard in self._shards:
            shard.exchange.release_shards()

    @override
    def take_part(self) -> None:
        """See `InnerStep.take_part`: the others need this rank's shard, updated with the options that it has."""
        self.step(None)

    @override
    def state_dict(self) -> dict[str, Any] | None:
        if self._is_fresh:
            return None
        return whole_state_dict(self._optimizer, self._plain, self._shards, self._inner)

    @override
    def state_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """See `InnerStep.state_loaded`: take the shard of it; before the first update that can wait."""
        self._is_lost = False
        if any(segment.master is not None for segment in self._segments()):
            if "param_groups" not in state_dict:
                raise UsageError(
                    f"load_state_dict() of {self._plain.__name__} takes another form than torch's optimizers, whose "
                    "types cannot be kept in 16 bits: use ud.save and ud.load"
                )
            keep_types(self._optimizer, state_dict)
        if not self._is_fresh:
            self._adopt()

    @override
    def kept_state(self, placements: Mapping[int, Placement]) -> KeepsState:
        self._prepare()
        return ShardedOptimizerState(self._optimizer, placements, self._shards, self._inner, self._loaded)

    def _loaded(self) -> None:
        """Called when the segments have got their state from a checkpoint or a commit."""
        self._is_lost = False
        self._inner.set_segments(self._segments())

    def _check_new(self) -> None:
        """Raise UsageError if the optimizer needs whole tensors now, with groups or forms that came later."""
        if needs_whole_tensors(self._optimizer, self._plain):
            raise UsageError(
                f"parameters that were added, or are trained from now on, make {self._plain.__name__} look at whole "
                f"tensors, and {self._strategy.name} has cut the others anywhere. Give all groups to the optimizer "
                "before it is distributed, or use zero:whole=true"
            )

    def _prepare(self) -> None:
        """Before the first update or checkpoint: take over this rank's shard of the optimizer's state."""
        if self._is_fresh:
            self._adopt()
            self._is_fresh = False

    def _adopt(self) -> None:
        for shard in self._shards:
            shard.segments = adopt(self._optimizer, shard, self._inner)
        self._inner.set_segments(self._segments())

    def _make_shard(self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor]) -> ParameterShard:
        groups = self._groups()
        recorder = self._update.context.recorder

        def make_memory() -> ParameterMemory:
            if self._units is not None:
                return UnitMemory(exchange, parameters, self._units)
            kinds = {cut.memory for cut in exchange.partition.buckets}
            wish = self._strategy.sharing(self._update.context)
            if may_share(wish, exchange.shard_groups[HOST].communicator, kinds):
                return SharedPagesMemory(exchange, parameters)
            return FlatParameterMemory(exchange, parameters, recorder)

        return ParameterShard(
            exchange,
            parameters,
            make_memory,
            lambda index: groups[id(parameters[index])],
            self._master_dtype,
            self._offload,
        )

    def _master_dtype(self, dtype: DType) -> DType:
        precision = self._update.options.precision
        return dtype if precision is None else precision.master_dtype(dtype)

    def _segments(self) -> list[SegmentTensor]:
        return [segment for shard in self._shards for segment in shard.segments]

    def _groups(self) -> dict[int, int]:
        """Return the number of each parameter's group, by identity: scripts move parameters between groups."""
        return {
            id(parameter): number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }

    def _split(self, shard: ParameterShard, present: Sequence[bool], groups: Mapping[int, int]) -> bool:
        """Split segments whose parameters cannot be updated together: some have no gradient, or moved to another group.

        Once split they stay split, because their step counts differ from then on. Returns whether anything has changed.
        """
        segments: list[SegmentTensor] = []
        changed = False
        for segment in shard.segments:
            group_of = {
                piece.parameter: groups.get(id(shard.parameters[piece.parameter]), segment.group)
                for piece in segment.pieces
            }
            keys = [(present[piece.parameter], group_of[piece.parameter]) for piece in segment.pieces]
            parts = [segment]
            if any(key != keys[0] for key in keys):
                parts = []
                for part, state in segment.split(keys, self._inner.pop_state(segment)):
                    self._inner.set_state(part, state)
                    parts.append(part)
            for part in parts:
                group = group_of[part.pieces[0].parameter]
                changed = changed or group != part.group
                part.group = group
            changed = changed or len(parts) > 1
            segments += parts
        shard.segments = segments
        return changed


def _listed(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
