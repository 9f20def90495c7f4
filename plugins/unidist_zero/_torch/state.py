"""Optimizer state of whole parameters and of this rank's runs: taking a share of the one, gathering the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unidist.buffer import HOST
from unidist.negotiation.objects import gather_objects
from unidist_torch.gradients.parameters import shaped
from unidist_zero._torch.inner_optimizer import InnerOptimizer
from unidist_zero._torch.runs import RunTensor, State, piece_in_memory_order
from unidist_zero._torch.shares import ParameterShare

_COUNTS = frozenset(("step", "mu_product", "eta", "mu"))
"""What torch's optimizers keep for a parameter as one number."""


def adopt(optimizer: torch.optim.Optimizer, share: ParameterShare, inner: InnerOptimizer) -> list[RunTensor]:
    """Move this rank's share of an optimizer's state, of whole parameters, to its runs; returns the runs.

    The optimizer has no state for these parameters afterwards. A run whose parameters differ in what is no tensor of
    theirs (their counts of steps) is split. Parameters without state have none afterwards either.
    """
    whole: dict[int, State] = {
        index: optimizer.state.pop(parameter)
        for index, parameter in enumerate(share.parameters)
        if parameter in optimizer.state
    }
    slots = _slots(whole, share.forms)
    runs: list[RunTensor] = []
    for run in share.runs:
        inner.forget(run)
        keys = [_signature(whole.get(piece.parameter, {}), slots) for piece in run.pieces]
        alike = all(key == keys[0] for key in keys)
        for part in [run] if alike else [part for part, _ in run.split(keys, {})]:
            inner.set_state(part, _state_of(part, whole, share.forms, slots))
            runs.append(part)
    return runs


def keep_types(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Give an optimizer the state that it has just loaded in the types that it was saved in.

    torch brings it to the types of the parameters, which have 16 bits where the state belongs to a copy that has more.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype and loaded.shape == value.shape:
                optimizer.state[parameter][name] = value.detach().to(loaded.device, copy=True)


def whole_state_dict(
    optimizer: torch.optim.Optimizer,
    plain: type[torch.optim.Optimizer],
    shares: Sequence[ParameterShare],
    inner: InnerOptimizer,
) -> dict[str, Any]:
    """Return the optimizer's state dict with the state of every rank, on every rank. Collective.

    It has the form that the optimizer's own class gives, so it loads into one that is not distributed.
    """
    for share in shares:
        optimizer.state.update(_gathered(share, inner))
    try:
        return plain.state_dict(optimizer)
    finally:
        for share in shares:
            for parameter in share.parameters:
                optimizer.state.pop(parameter, None)


def _gathered(share: ParameterShare, inner: InnerOptimizer) -> dict[torch.Tensor, State]:
    """Return the whole state of each parameter that has some. Bucket by bucket, to limit what is under way at once."""
    whole: dict[torch.Tensor, State] = {}
    communicator = share.exchange.lanes[HOST].shard
    for number in range(len(share.exchange.partition.buckets)):
        mine = [
            (piece.parameter, piece.start, _piece_state(run, piece.offset - run.run.offset, piece.count, inner))
            for run in share.runs
            for piece in run.pieces
            if run.run.bucket == number
        ]
        for pieces in gather_objects(communicator, mine):
            for index, start, state in pieces:
                if state:
                    parameter = share.parameters[index]
                    device = share.device_of_state(parameter)
                    _fill(whole.setdefault(parameter, {}), share.forms[index], device, start, state)
    return whole


class _Slot:
    """A piece of state that has an element for each of the parameter's."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat


def _piece_state(run: RunTensor, begin: int, count: int, inner: InnerOptimizer) -> State:
    state: State = {}
    for name, value in inner.state(run).items():
        if run.is_slot(value):
            state[name] = _Slot(run.flat_slot(value)[begin : begin + count].detach().cpu().clone())
        else:
            state[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    return state


def _fill(whole: State, form: torch.Tensor, device: torch.device, start: int, state: State) -> None:
    """Add what one rank has of a parameter's state."""
    for name, value in state.items():
        if not isinstance(value, _Slot):
            whole.setdefault(name, value)
            continue
        if name not in whole:
            whole[name] = shaped(torch.zeros(form.numel(), dtype=value.flat.dtype, device=device), form)
        flat = whole[name].as_strided((form.numel(),), (1,))  # as `shaped` got it
        flat[start : start + value.flat.numel()] = value.flat.to(device)


def _signature(state: State, slots: set[str]) -> tuple[Any, ...]:
    """Return what parameters must have in common to be updated as one tensor."""
    return tuple((name, "slot" if name in slots else _plain(value)) for name, value in sorted(state.items()))


def _plain(value: Any) -> str:
    return f"{value.dtype} {value.tolist()}" if isinstance(value, torch.Tensor) else repr(value)


def _slots(whole: dict[int, State], parameters: Sequence[torch.Tensor]) -> set[str]:
    """Return the names of state that has an element for each of the parameter's.

    Of a parameter without dims one cannot tell it from a count; what others have under the same name can.
    """
    found: set[str] = set()
    others: set[str] = set()
    scalars: set[str] = set()
    for index, state in whole.items():
        parameter = parameters[index]
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                others.add(name)
            elif parameter.dim():
                found.add(name)
            elif name not in _COUNTS:
                scalars.add(name)
    return found | (scalars - others)


def _state_of(run: RunTensor, whole: dict[int, State], forms: Sequence[torch.Tensor], slots: set[str]) -> State:
    """Return a run's state, put together from that of its parameters."""
    state: State = {}
    for name, value in whole.get(run.pieces[0].parameter, {}).items():
        if run.form is not None or name not in slots:
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        dtype = run.leaf.dtype if value.is_floating_point() else value.dtype
        flat = torch.zeros(run.run.count, dtype=dtype, device=run.leaf.device)
        for piece in run.pieces:
            begin = piece.offset - run.run.offset
            source = whole[piece.parameter][name]
            flat[begin : begin + piece.count] = piece_in_memory_order(source, piece, forms[piece.parameter])
        state[name] = flat
    return state
