"""Sharded optimizer state in checkpoints: each rank saves and reads its flat segments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from unidist.checkpoint.format.interface import Plain, SavedSection
from unidist.checkpoint.format.optimizer_record import OptimizerRecord
from unidist.checkpoint.format.pieces import Piece as SavedPiece
from unidist.checkpoint.format.pieces import Placement, slot_name
from unidist.errors import UsageError
from unidist_torch.checkpoint.optimizer import MASTER, OptimizerState
from unidist_torch.checkpoint.tensors import piece_of, read_into
from unidist_torch.memory import TORCH_DTYPES, dtype_of
from unidist_torch.parameter_states import ParameterState, is_slot, scalar_dtype
from unidist_zero._torch.inner_optimizer import InnerOptimizer
from unidist_zero._torch.segments import SegmentTensor
from unidist_zero._torch.shards import ParameterShard
from unidist_zero.sharding.partition import Piece


class ShardedOptimizerState(OptimizerState):
    """The state of this rank's segments.

    Args:
        optimizer: the bound optimizer, which itself has state of frozen parameters only: those of no shard.
        placements: of its parameters, by their identity.
        shards: this rank's.
        inner: has the state.
        loaded: called when segments were split and have their new state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        placements: Mapping[int, Placement],
        shards: Sequence[ParameterShard],
        inner: InnerOptimizer,
        loaded: Callable[[], None],
    ) -> None:
        super().__init__(optimizer, placements)
        self._shards = shards
        self._inner = inner
        self._loaded = loaded

    @override
    def pieces(self) -> Sequence[SavedPiece]:
        found = list(super().pieces())
        for shard in self._shards:
            for segment in shard.segments:
                for slot, value in self._kept(segment):
                    if segment.form is not None:
                        if is_slot(slot, value, segment.form):
                            parameter = shard.parameters[segment.pieces[0].parameter]
                            neutral = self._naming_of(parameter).neutral(slot)
                            found.append(self._piece(self._placement(parameter), neutral, value, segment.form))
                    elif segment.is_slot(value):
                        found += [self._flat_piece(shard, segment, piece, slot, value) for piece in segment.pieces]
        return found

    @override
    def values(self) -> dict[str, Plain]:
        """See `KeepsState.values`: of the parameters of which this rank has some."""
        values = super().values()
        scalars = values["scalars"]
        assert isinstance(scalars, dict)
        for shard in self._shards:
            for segment in shard.segments:
                counts = {
                    slot: value if isinstance(value, int) else float(value)
                    for slot, value in self._inner.state(segment).items()
                    if value is not None and not self._is_slot(segment, slot, value)
                }
                for piece in segment.pieces if counts else ():
                    scalars[self._placement(shard.parameters[piece.parameter]).name] = dict(counts)
        return values

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        """See `KeepsState.load`: reads what belongs to this rank's segments."""
        record = OptimizerRecord.of(section.values)
        slots = self._slots_in(section, record)
        sharded = {id(parameter) for shard in self._shards for parameter in shard.parameters}
        self._load_whole(section, [each for _, each in self._parameters() if id(each) not in sharded])
        for shard in self._shards:
            segments: list[SegmentTensor] = []
            for segment in shard.segments:
                self._inner.pop_state(segment)
                keys = []
                for piece in segment.pieces:
                    parameter = shard.parameters[piece.parameter]
                    kept = slots.get(self._placement(parameter).name, [])
                    keys.append((sorted(self._scalars(record, parameter).items()), kept))
                alike = all(key == keys[0] for key in keys)
                parts = [segment] if alike else [part for part, _ in segment.split([repr(key) for key in keys], {})]
                for part in parts:
                    self._inner.set_state(part, self._read(section, record, shard, part, slots))
                    self._read_master(section, shard, part)
                segments += parts
            shard.segments = segments
        self._loaded()

    def _kept(self, segment: SegmentTensor) -> list[tuple[str, Any]]:
        """Return a segment's state, and its master copy."""
        master = [] if segment.master is None else [(MASTER, segment.leaf.detach())]
        return [*self._inner.state(segment).items(), *master]

    def _read_master(self, section: SavedSection, shard: ParameterShard, segment: SegmentTensor) -> None:
        """Read a master copy that was saved; without one it follows the parameters."""
        if segment.master is None:
            return
        leaf = segment.leaf.detach()
        for piece in segment.pieces:
            placement = self._placement(shard.parameters[piece.parameter])
            name = slot_name(placement.name, MASTER)
            if name in section.tensors:
                begin = piece.offset - segment.span.offset
                target = leaf if segment.form is not None else leaf[begin : begin + piece.count]
                part = placement.part(piece.start, piece.start + piece.count)
                read_into(section, name, part, target)

    def _read(
        self,
        section: SavedSection,
        record: OptimizerRecord,
        shard: ParameterShard,
        segment: SegmentTensor,
        slots: Mapping[str, Sequence[str]],
    ) -> ParameterState:
        first = shard.parameters[segment.pieces[0].parameter]
        naming, path = self._reading(record, first), self._placement(first).name
        state: ParameterState = {
            slot: number if isinstance(number, int) else torch.tensor(number, dtype=scalar_dtype())
            for slot, number in self._scalars(record, first).items()
        }
        for slot in slots.get(path, ()):
            if segment.form is not None:
                # Of the leaf's type, which is wider than the parameter's where there is a master copy.
                state[naming.native(slot)] = self._slot(section, record, first, slot, segment.leaf.detach())
                continue
            dtype = section.tensors[slot_name(path, slot)].dtype
            flat = torch.zeros(
                segment.span.count,
                dtype=segment.leaf.dtype if dtype.is_floating else TORCH_DTYPES[dtype],
                device=segment.leaf.device,
            )
            for piece in segment.pieces:
                parameter = shard.parameters[piece.parameter]
                placement = self._placement(parameter)
                begin = piece.offset - segment.span.offset
                target = flat[begin : begin + piece.count]
                self._check_order(shard, piece)
                part = placement.part(piece.start, piece.start + piece.count)
                read_into(section, slot_name(placement.name, slot), part, target)
                factor = self._factor(record, parameter, slot)
                if factor != 1.0:
                    target.mul_(factor)
            state[naming.native(slot)] = flat
        return state

    def _flat_piece(
        self, shard: ParameterShard, segment: SegmentTensor, piece: Piece, slot: str, value: torch.Tensor
    ) -> SavedPiece:
        self._check_order(shard, piece)
        parameter = shard.parameters[piece.parameter]
        placement = self._placement(parameter)
        begin = piece.offset - segment.span.offset
        return piece_of(
            placement.tensor(dtype_of(value), self._naming_of(parameter).neutral(slot)),
            placement.part(piece.start, piece.start + piece.count),
            value[begin : begin + piece.count],
        )

    def _check_order(self, shard: ParameterShard, piece: Piece) -> None:
        parameter = shard.parameters[piece.parameter]
        if not shard.forms[piece.parameter].is_contiguous():
            raise UsageError(
                f"the state of {self._placement(parameter).name!r} is sharded in the order of its memory, which is not "
                "that of its dims (channels_last?), so the shards are no ranges of it. Give parameters to ranks as a "
                "whole (zero:whole=true), or keep the model in contiguous memory"
            )

    @override
    def _slots_of(self, parameter: torch.Tensor) -> Collection[str]:
        return self._sharded_slots.get(id(parameter)) or super()._slots_of(parameter)

    @cached_property  # a state is made for each save and load
    def _sharded_slots(self) -> dict[int, list[str]]:
        """The names of the slots of the parameters of which this rank has a shard, by their identity."""
        return {
            id(shard.parameters[piece.parameter]): [
                slot for slot, value in self._inner.state(segment).items() if self._is_slot(segment, slot, value)
            ]
            for shard in self._shards
            for segment in shard.segments
            for piece in segment.pieces
        }

    def _is_slot(self, segment: SegmentTensor, slot: str, value: Any) -> bool:
        return segment.is_slot(value) if segment.form is None else is_slot(slot, value, segment.form)

    def _placement(self, parameter: torch.Tensor) -> Placement:
        return self._placements[id(parameter)]
