"""Conversion between optimizer state of whole parameters and state of this rank's segments: sharding and gathering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unidist.buffer import HOST
from unidist.negotiation.objects import gather_objects
from unidist_torch.gradients.parameters import shaped
from unidist_torch.parameter_states import ParameterState, ParameterStates, is_slot
from unidist_zero._torch.inner_optimizer import InnerOptimizer
from unidist_zero._torch.segments import SegmentTensor, piece_in_memory_order
from unidist_zero._torch.shards import ParameterShard


def adopt(optimizer: torch.optim.Optimizer, shard: ParameterShard, inner: InnerOptimizer) -> list[SegmentTensor]:
    """Move this rank's shard of an optimizer's state from whole parameters to its segments; returns the segments.

    The optimizer has no state for these parameters afterwards. A segment whose parameters have different scalars
    (counts of steps) is split. Parameters without state have none afterwards either.
    """
    states = ParameterStates(optimizer)
    taken = ((index, states.take(parameter)) for index, parameter in enumerate(shard.parameters))
    whole = {index: state for index, state in taken if state}
    slots = _slots(whole, shard.forms)
    segments: list[SegmentTensor] = []
    for segment in shard.segments:
        inner.pop_state(segment)
        keys = [_signature(whole.get(piece.parameter, {}), slots) for piece in segment.pieces]
        alike = all(key == keys[0] for key in keys)
        for part in [segment] if alike else [part for part, _ in segment.split(keys, {})]:
            inner.set_state(part, _state_of(part, whole, shard.forms, slots))
            segments.append(part)
    return segments


def keep_types(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Give an optimizer the state that it has just loaded in the types that it was saved in.

    torch converts it to the types of the parameters, which have 16 bits even if the state belongs to a wider copy.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = ParameterStates(optimizer)
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            loaded = states.of(parameter).get(name)
            if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype and loaded.shape == value.shape:
                states.of(parameter)[name] = value.detach().to(loaded.device, copy=True)


def whole_state_dict(
    optimizer: torch.optim.Optimizer,
    plain: type[torch.optim.Optimizer],
    shards: Sequence[ParameterShard],
    inner: InnerOptimizer,
) -> dict[str, Any]:
    """Return the optimizer's state dict with the state of every rank, on every rank. Collective.

    It is what the optimizer's own class would return, so it loads into an optimizer that is not distributed.
    """
    states = ParameterStates(optimizer)
    for shard in shards:
        for parameter, state in _gathered(shard, inner).items():
            states.replace(parameter, state)
    try:
        return plain.state_dict(optimizer)
    finally:
        for shard in shards:
            for parameter in shard.parameters:
                states.take(parameter)


def _gathered(shard: ParameterShard, inner: InnerOptimizer) -> dict[torch.Tensor, ParameterState]:
    """Return the whole state of each parameter that has some. Bucket by bucket, to limit what is in flight at once."""
    whole: dict[torch.Tensor, ParameterState] = {}
    communicator = shard.exchange.shard_groups[HOST].communicator
    for number in range(len(shard.exchange.partition.buckets)):
        mine = [
            (
                piece.parameter,
                piece.start,
                _piece_state(segment, piece.offset - segment.span.offset, piece.count, inner),
            )
            for segment in shard.segments
            for piece in segment.pieces
            if segment.span.bucket == number
        ]
        for pieces in gather_objects(communicator, mine):
            for index, start, state in pieces:
                if state:
                    parameter = shard.parameters[index]
                    device = shard.device_of_state(parameter)
                    _fill(whole.setdefault(parameter, {}), shard.forms[index], device, start, state)
    return whole


class _Slot:
    """An entry of the state that has an element for each of the parameter's."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat


def _piece_state(segment: SegmentTensor, begin: int, count: int, inner: InnerOptimizer) -> ParameterState:
    state: ParameterState = {}
    for name, value in inner.state(segment).items():
        if segment.is_slot(value):
            state[name] = _Slot(segment.flat_slot(value)[begin : begin + count].detach().cpu().clone())
        else:
            state[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    return state


def _fill(whole: ParameterState, form: torch.Tensor, device: torch.device, start: int, state: ParameterState) -> None:
    """Add what one rank has of a parameter's state."""
    for name, value in state.items():
        if not isinstance(value, _Slot):
            whole.setdefault(name, value)
            continue
        if name not in whole:
            whole[name] = shaped(torch.zeros(form.numel(), dtype=value.flat.dtype, device=device), form)
        flat = whole[name].as_strided((form.numel(),), (1,))  # as `shaped` got it
        flat[start : start + value.flat.numel()] = value.flat.to(device)


def _signature(state: ParameterState, slots: set[str]) -> tuple[Any, ...]:
    """Return what parameters must have in common to be updated as one tensor."""
    return tuple((name, "slot" if name in slots else _plain(value)) for name, value in sorted(state.items()))


def _plain(value: Any) -> str:
    return f"{value.dtype} {value.tolist()}" if isinstance(value, torch.Tensor) else repr(value)


def _slots(whole: dict[int, ParameterState], parameters: Sequence[torch.Tensor]) -> set[str]:
    """Return the names of state that has an element for each of the parameter's.

    Of a parameter without dims one cannot tell it from a count; what others have under the same name can.
    """
    found: set[str] = set()
    others: set[str] = set()
    without_dims: set[str] = set()
    for index, state in whole.items():
        parameter = parameters[index]
        for name, value in state.items():
            if not is_slot(name, value, parameter) or value.shape != parameter.shape:
                others.add(name)
            else:
                (found if parameter.dim() else without_dims).add(name)
    return found | (without_dims - others)


def _state_of(
    segment: SegmentTensor, whole: dict[int, ParameterState], forms: Sequence[torch.Tensor], slots: set[str]
) -> ParameterState:
    """Return a segment's state, assembled from that of its parameters."""
    state: ParameterState = {}
    for name, value in whole.get(segment.pieces[0].parameter, {}).items():
        if segment.form is not None or name not in slots:
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        dtype = segment.leaf.dtype if value.is_floating_point() else value.dtype
        flat = torch.zeros(segment.span.count, dtype=dtype, device=segment.leaf.device)
        for piece in segment.pieces:
            begin = piece.offset - segment.span.offset
            source = whole[piece.parameter][name]
            flat[begin : begin + piece.count] = piece_in_memory_order(source, piece, forms[piece.parameter])
        state[name] = flat
    return state
