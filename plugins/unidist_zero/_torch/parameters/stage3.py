"""Stage 3 on PyTorch: a model whose parameters are sharded over the ranks.

`prepare_units` finds the FSDP units before the optimizer is bound, `UnitMemory` gives the inner step its shards, and
`add_untrained` shards parameters that the optimizer does not train; `state_dict` and checkpoints see whole parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from unidist.buffer import HOST, Buffer
from unidist.checkpoint.format.interface import HasKeptState, KeepsState, SavedSection
from unidist.checkpoint.format.pieces import Piece as SavedPiece
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.buckets import ParameterInfo, plan_buckets
from unidist.waits import calling
from unidist_torch.checkpoint.states import HoldsParameters, ModelState
from unidist_torch.checkpoint.tensors import piece_of, read_into
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import TORCH_DTYPES, buffer_of, dtype_of, memory_kind
from unidist_torch.models.guarded_parameter import name_guard
from unidist_zero._torch.parameters.fsdp_units import Unit, Units
from unidist_zero._torch.parameters.gathered_bucket import BucketState, GatheredBucket
from unidist_zero._torch.parameters.lazy_init import DeferredModel, has_deferred
from unidist_zero._torch.parameters.offload import StateMemory
from unidist_zero._torch.parameters.shared_pages import PagedModel
from unidist_zero.sharding.gather_check import GatherCheck
from unidist_zero.sharding.gathered_model import GathersParameters
from unidist_zero.sharding.partition import Partition, Piece, ShardedBucket
from unidist_zero.sharding.partition import partition as cut
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
from unidist_zero.sharding.shard_groups import ShardGroup, allocate

if TYPE_CHECKING:
    from unidist.optim.update import Update
    from unidist.runtime_api import RuntimeAPI

UNIT = "_unidist_units"
_paged: MutableMapping[torch.Tensor, PagedModel] = WeakIdKeyDictionary()
"""By parameter; not an attribute of it, which would be in copies and files of the model."""
"""The attribute by which a parameter knows the `ShardedModel`, or `PagedModel`, that it is of."""


class ShardedModel(HasKeptState, HoldsParameters, GathersParameters):
    """Attached to a model at stage 3.

    Args:
        model: the model.
        patterns: see `find_units`.
        num_ahead: units to prefetch.

    Attributes:
        offload: where shards are kept; None: where the parameters were. Set before anything is sharded.
    """

    offload: StateMemory | None = None

    def __init__(self, model: torch.nn.Module, patterns: Sequence[str] | None = None, *, num_ahead: int = 1) -> None:
        self._model = model
        self._quiet = False
        self._context: RuntimeAPI | None = None
        self._is_moving = False  # the parameters have lost their shards, and not all have a new place yet
        self._shard_groups: dict[str, ShardGroup] = {}
        self._names: list[str] = []  # of the unit of each bucket that was made, for messages
        self._deferred = DeferredModel(model) if has_deferred(model) else None
        self.units = Units(model, patterns, num_ahead=num_ahead)
        for parameter in model.parameters():
            setattr(parameter, UNIT, self)
        hooked: Any = (
            model  # whose methods below torch has left without types; functions, as it gives them an attribute
        )
        hooked.register_state_dict_pre_hook(lambda module, *args: self._before_state_dict(module))
        hooked.register_state_dict_post_hook(lambda module, state, *args: self._after_state_dict(module, state))
        hooked.register_load_state_dict_pre_hook(lambda module, *args: self._before_load(module))
        hooked.register_load_state_dict_post_hook(lambda module, *args: self._after_load(module))

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model is a plain one, with all values; the hooks do nothing for it."""
        if not self.units.paused and any(bucket.state is BucketState.ABSENT for bucket in self._buckets()):
            raise UsageError(
                "this model is divided over the ranks (zero=3), and its parameters are away: copy it on every rank in "
                "`with unidist_zero.gathered(model):`"
            )

    def rebind(self, context: RuntimeAPI) -> None:
        """Belong to this context from now on.

        If the model belonged to another one before, its shards are dropped: `add` and `add_untrained` allocate new ones
        for all parameters, and loading a state gives them values. An unfinished step of the old context is dropped too.
        """
        if self._context is not None and self._context is not context:
            self._is_moving = True
            self.units.abandon()
            for shard_group in self._shard_groups.values():
                shard_group.close()
            self._shard_groups = {}
            self._names = []
        self._context = context
        for name, parameter in self._model.named_parameters():
            name_guard(parameter, name, context.topology.rank)

    def groups(self, parameters: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
        """Return the positions of each unit's parameters among an optimizer's."""
        found: dict[str, list[int]] = {}
        for position, parameter in enumerate(parameters):
            unit = self.units.of_parameter.get(id(parameter))
            if unit is None:
                raise ConfigurationError(
                    f"zero=3: parameter {position} of the optimizer is none of the model's. Bind it with "
                    "distribute(model, optimizer), and add only parameters of this model later"
                )
            found.setdefault(unit.name, []).append(position)
        return tuple(tuple(positions) for positions in found.values())

    def add(
        self, partition: Partition, parameters: Mapping[int, torch.Tensor], shard_groups: Mapping[str, ShardGroup]
    ) -> list[GatheredBucket]:
        """Shard parameters from now on; returns their buckets, each of which belongs to one unit."""
        made = []
        for number, bucket in enumerate(partition.buckets):
            if not bucket.slots:
                continue
            shard_group = shard_groups[bucket.memory]
            rank = shard_group.communicator.rank
            own = {slot.parameter: parameters[slot.parameter] for slot in bucket.slots}
            for parameter in own.values():
                self._leave_old_bucket(parameter)
            shard = self._allocate(bucket, shard_group)
            pieces = [piece for piece in partition.pieces(rank) if piece.bucket == number]
            unit = self._unit_of(own.values())
            self._names.append(unit.name or "the parameters outside of all units")
            check = GatherCheck(shard_groups[HOST].communicator, len(self._names) - 1, self._names)
            is_offloaded = self.offload is not None
            made.append(
                GatheredBucket(
                    number,
                    bucket,
                    pieces,
                    own,
                    shard_group,
                    shard,
                    check,
                    initial=self._initial_state,
                    is_offloaded=is_offloaded,
                )
            )
            unit.buckets.append(made[-1])
        return made

    def shard_groups_for(self, exchange: ReduceScatterExchange) -> Mapping[str, ShardGroup]:
        """Return the shard groups that gather parameters, apart from those of gradients: each has its own order.

        Collective when first called for a kind of memory.
        """
        for kind, shard_group in exchange.shard_groups.items():
            if kind not in self._shard_groups:
                duplicate = shard_group.communicator.split(range(shard_group.communicator.size))
                assert duplicate is not None
                self._shard_groups[kind] = ShardGroup(duplicate)
        return self._shard_groups

    def add_untrained(self, update: Update) -> None:
        """Shard the parameters that no optimizer trains, after the others. Collective."""
        exchange = update.exchanges[0]
        assert isinstance(exchange, ReduceScatterExchange)
        known = self.held()
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        rest = [
            (number, parameter)
            for number, unit in enumerate(self.units.units)
            for key, parameter in unit.parameters.items()
            if key not in known
        ]
        infos = [
            ParameterInfo(
                names[id(parameter)], tuple(parameter.shape), dtype_of(parameter), memory_kind(parameter), number
            )
            for number, parameter in rest
        ]
        layouts = plan_buckets(infos, bucket_bytes=1 << 25)
        shard_groups = self.shard_groups_for(exchange)
        divided = cut(layouts, exchange.partition.num_shards)
        self.add(divided, {i: parameter for i, (_, parameter) in enumerate(rest)}, shard_groups)
        self._is_moving = False

    def initialize(self) -> None:
        """Initialize a model that was built without memory, once all its parameters are sharded. Collective."""
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            deferred.initialize(self.units)

    @contextmanager
    @override
    def gathered(self) -> Iterator[None]:
        for bucket in self._buckets():
            bucket.gather_for_writing()
        self.units.paused = True
        try:
            yield
        finally:
            self.units.paused = False
            self.units.release(spares_views=True)

    @override
    def kept_state(self) -> KeepsState:
        return self.state_of(self._model)

    @override
    def state_of(self, model: torch.nn.Module) -> KeepsState:
        self._quiet = True  # only names are wanted of `state_dict`
        try:
            return ShardedModelState(model, self)
        finally:
            self._quiet = False

    def held(self) -> dict[int, list[tuple[GatheredBucket, Piece]]]:
        """Return this rank's pieces of each parameter, by its identity."""
        found: dict[int, list[tuple[GatheredBucket, Piece]]] = {}
        for bucket in self._buckets():
            for slot in bucket.cut.slots:
                if bucket.holds(slot.parameter):
                    found.setdefault(id(bucket.parameter(slot.parameter)), [])
            for piece in bucket.pieces:
                if bucket.holds(piece.parameter):
                    found[id(bucket.parameter(piece.parameter))].append((bucket, piece))
        return found

    @property
    def _initial_state(self) -> BucketState:
        """The state of a new bucket."""
        if self._deferred is not None:
            return BucketState.EMPTY
        return BucketState.LOST if self._is_moving else BucketState.WHOLE

    def _allocate(self, bucket: ShardedBucket, shard_group: ShardGroup) -> Buffer:
        """Return memory for this rank's shard."""
        count = bucket.counts[shard_group.communicator.rank]
        if self.offload is not None:
            return buffer_of(self.offload.zeros((count,), (1,), TORCH_DTYPES[bucket.dtype]))
        nbytes = count * bucket.dtype.itemsize
        return allocate(TorchFramework(), shard_group.communicator, bucket.memory, nbytes).cast(bucket.dtype)

    def _buckets(self) -> list[GatheredBucket]:
        return [bucket for unit in self.units.units for bucket in unit.buckets]

    def _unit_of(self, parameters: Collection[torch.Tensor]) -> Unit:
        units = {self.units.of_parameter[id(parameter)].name: parameter for parameter in parameters}
        assert len(units) == 1, "a bucket has parameters of one unit"
        return self.units.of_parameter[id(next(iter(units.values())))]

    def _leave_old_bucket(self, parameter: torch.Tensor) -> None:
        """Take a frozen parameter that is trained from now on out of its old bucket."""
        for bucket in self._buckets():
            for slot in bucket.cut.slots:
                if bucket.holds(slot.parameter) and bucket.parameter(slot.parameter) is parameter:
                    bucket.finish_gather()
                    bucket.remove(slot.parameter)

    # Hooks

    def _before_state_dict(self, module: torch.nn.Module) -> None:
        if module is self._model and not (self._quiet or self.units.paused):
            with calling("model.state_dict()"):
                self.units.gather()

    def _after_state_dict(self, module: torch.nn.Module, state: dict[str, Any]) -> None:
        if self._quiet or module is not self._model:
            return
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.detach().clone()  # the gathered memory goes
        if not self.units.paused:
            self.units.release()

    def _before_load(self, module: torch.nn.Module) -> None:
        if module is self._model and not self.units.paused:
            for bucket in self._buckets():
                bucket.gather_for_writing()

    def _after_load(self, module: torch.nn.Module) -> None:
        if module is self._model and not self.units.paused:
            self.units.release()


class ShardedModelState(ModelState):
    """The model's part in checkpoints: shards of parameters, and whole buffers.

    Args:
        model: the model, or one that it is a module of.
        sharded: has the shards.
    """

    def __init__(self, model: torch.nn.Module, sharded: ShardedModel) -> None:
        super().__init__(model)
        self._sharded = sharded

    @override
    def pieces(self) -> Sequence[SavedPiece]:
        held = self._settled()
        found = []
        for path, info, part in self._places():
            tensor = self._tensors[path]
            if id(tensor) not in held:
                found.append(piece_of(info, part, tensor))
                continue
            for bucket, piece in held[id(tensor)]:
                self._check_order(path, piece, bucket)
                found.append(
                    piece_of(info, part.range_within(piece.start, piece.start + piece.count), bucket.piece(piece))
                )
        return found

    @override
    def names(self) -> Collection[str]:
        return [info.name for _, info, _ in self._places()]

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        """See `KeepsState.load`: this rank reads its shards."""
        held = self._settled()
        for unit in self._sharded.units.units:
            unit.release()
        for path, info, part in self._places():
            tensor = self._tensors[path]
            if info.name not in section.tensors:
                continue
            if id(tensor) not in held:
                read_into(section, info.name, part, tensor)
                continue
            for bucket, piece in held[id(tensor)]:
                self._check_order(path, piece, bucket)
                wanted = part.range_within(piece.start, piece.start + piece.count)
                read_into(section, info.name, wanted, bucket.piece(piece))
        for unit in self._sharded.units.units:
            for bucket in unit.buckets:
                bucket.mark_restored()

    def _settled(self) -> dict[int, list[tuple[GatheredBucket, Piece]]]:
        for unit in self._sharded.units.units:
            for bucket in unit.buckets:
                bucket.update_shard()
        return self._sharded.held()

    def _check_order(self, path: str, piece: Piece, bucket: GatheredBucket) -> None:
        if not bucket.is_row_major(piece.parameter):
            raise UsageError(
                f"{path!r} is sharded in the order of its memory, which is not that of its dims (channels_last?), so "
                "the shards are no ranges of it. Keep the model in contiguous memory"
            )


def sharded_model_of(parameters: Sequence[torch.Tensor]) -> ShardedModel | PagedModel:
    """Return what `prepare_units` or `prepare_pages` has attached to the model of these parameters.

    Raises:
        ConfigurationError: it was not prepared.
    """
    for parameter in parameters:
        found = _attached(parameter)
        if found is not None:
            return found
    raise ConfigurationError(
        "zero=3 shards the model's parameters, so it must see the model: bind the optimizer with "
        "distribute(model, optimizer). Stages 1 and 2 need the optimizer alone"
    )


def prepare_units(model: torch.nn.Module, patterns: Sequence[str] | None, *, num_ahead: int) -> torch.nn.Module:
    """Prepare a model whose parameters are gathered unit by unit; they stay as they are until the optimizer is bound.

    Args:
        model: the model.
        patterns: see `find_units`.
        num_ahead: units to prefetch.
    """
    _refuse_second(model, None)
    model._unidist = ShardedModel(model, patterns, num_ahead=num_ahead)  # type: ignore[assignment]  # no parameter and no module
    return model


def prepare_pages(model: torch.nn.Module, context: RuntimeAPI) -> torch.nn.Module:
    """Prepare a model whose parameters will be in memory that all ranks share; it needs no units.

    Args:
        model: the model.
        context: of the run; a model of an earlier one may be distributed again.
    """
    _refuse_second(model, context)
    paged = PagedModel(context)
    for parameter in model.parameters():
        _paged[parameter] = paged
    return model


def _attached(parameter: torch.Tensor) -> ShardedModel | PagedModel | None:
    found = _paged.get(parameter, getattr(parameter, UNIT, None))
    return found if isinstance(found, ShardedModel | PagedModel) else None


def _refuse_second(model: torch.nn.Module, context: RuntimeAPI | None) -> None:
    found = [_attached(parameter) for parameter in model.parameters()]
    if any(isinstance(one, ShardedModel) or (isinstance(one, PagedModel) and one.is_of(context)) for one in found):
        raise ConfigurationError(
            "this model, or a part of it, is distributed already with zero=3, which takes one optimizer for a model: "
            "call distribute() once, with one optimizer that has several parameter groups, or use zero=1 or zero=2"
        )
