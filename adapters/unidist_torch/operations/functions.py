"""Objects, parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from unidist.errors import UsageError
from unidist.horovod_api.scope import scope_of
from unidist.negotiation import allgather_object as allgather_pickled
from unidist.negotiation import broadcast_object as broadcast_pickled
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_torch.composed import parts_of, shares_groups, sharing_groups
from unidist_torch.operations.divided import refuse_parts
from unidist_torch.operations.movement import start_broadcast


@runtime_checkable
class HasState(Protocol):
    """An optimizer, a scheduler, or an object around one."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take over a state."""


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank `root_rank`'s object on every rank of the process set. It must be picklable (cloudpickle)."""
    operations, scope = context.current().operations(process_set), scope_of(process_set)
    return broadcast_pickled(operations, obj, root=scope.root(root_rank), name=name or "broadcast_object")


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks of the process set, in rank order. They must be picklable (cloudpickle)."""
    return allgather_pickled(context.current().operations(process_set), obj, name=name or "allgather_object")


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy tensors of rank `root_rank` into those of all other ranks, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, `model.parameters()`, or a list; the same names on
            every rank, in the same order where there are none. Values that are not tensors are left alone.
        root_rank: whose tensors they are.
        process_set: the ranks that take part.

    Raises:
        ValueError: something else.
    """
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise ValueError(f"broadcast_parameters({type(params).__name__}): give model.state_dict() or a list of tensors")
    if isinstance(params, Mapping) and "param_groups" in params:
        raise ValueError("broadcast_parameters(optimizer.state_dict()): use broadcast_optimizer_state(optimizer)")
    items = list(
        params.items()
        if isinstance(params, Mapping)
        else [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(params)]
    )
    tensors = [(name, value) for name, value in items if isinstance(value, torch.Tensor)]
    if process_set is global_process_set:
        refuse_parts("broadcast_parameters", (value for _, value in tensors))
    handles = [
        start_broadcast(value, root_rank, f"broadcast_parameters.{name}", process_set, background=False)
        for name, value in tensors
    ]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(optimizer: HasState, root_rank: int = 0, model: torch.nn.Module | None = None) -> None:
    """Give every rank the state and the options (learning rates, ...) of rank `root_rank`'s optimizer.

    A rank whose optimizer has no state yet takes it over, and one that has some replaces it. Nothing is stepped. Where
    an optimizer has no state, parameters without a gradient get one of zeros, as Horovod's scripts expect it.

    Args:
        optimizer: of the same kind and parameters on every rank; any stock one but LBFGS, or an object around one, or
            a scheduler: its `state_dict` is sent, and its `load_state_dict` called.
        root_rank: whose state it is.
        model: accepted for Horovod's sake; it is not used.

    Raises:
        ValueError: it is `torch.optim.LBFGS`. Scripts of Horovod catch that; an elastic state takes it.
        UsageError: it has no such methods; or it is of a divided model, and has the state of this rank's part.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "broadcast_optimizer_state(LBFGS): as in Horovod, its state is not broadcast. Give every rank the same "
            "one by optimizer.load_state_dict(broadcast_object(optimizer.state_dict()))"
        )
    attributes: Mapping[str, Any] = getattr(optimizer, "__dict__", {})
    inner = {name: value for name, value in attributes.items() if isinstance(value, torch.optim.Optimizer)}
    if isinstance(optimizer, torch.nn.Module) or not isinstance(optimizer, HasState):
        names = ", ".join(map(repr, inner))
        advice = f"Give the optimizer in its attribute {names}" if inner else "Give one optimizer of torch.optim"
        raise UsageError(
            f"broadcast_optimizer_state({type(optimizer).__name__}): an optimizer is expected, or an object around one "
            f"that has state_dict() and load_state_dict(). {advice}"
        )
    for each in (optimizer, *inner.values()):
        groups: Sequence[Mapping[str, Any]] = getattr(each, "param_groups", ())
        refuse_parts("broadcast_optimizer_state", (parameter for group in groups for parameter in group["params"]))
    if isinstance(optimizer, torch.optim.Optimizer) and not getattr(optimizer, "state", True):
        _add_zero_gradients(optimizer)
    give_optimizer_state(optimizer, root_rank)


def _add_zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def give_optimizer_state(optimizer: HasState, root_rank: int) -> None:
    """Do what `broadcast_optimizer_state` does, for any stock optimizer, and for those within it. Collective."""
    if isinstance(optimizer, torch.optim.Optimizer) and shares_groups(optimizer):
        with sharing_groups(optimizer):
            _give_state(optimizer, root_rank)
            for part in parts_of(optimizer):  # whose state the outer one's may not have
                give_optimizer_state(part, root_rank)
    else:
        _give_state(optimizer, root_rank)


def _give_state(optimizer: HasState, root_rank: int) -> None:
    runtime = context.current()
    is_root = runtime.topology.rank == root_rank
    state_dict = optimizer.state_dict()  # with sharded updates collective
    outline = pytree.tree_map_only(torch.Tensor, _form_of, state_dict) if is_root else None
    outline = broadcast_pickled(runtime.negotiator, outline, root=root_rank, name="broadcast_optimizer_state")
    if not is_root:
        state_dict = pytree.tree_map_only(_TensorForm, _TensorForm.empty, outline)
    tensors = [each for each in pytree.tree_leaves(state_dict) if isinstance(each, torch.Tensor)]
    # In host memory while they travel: the ranks' devices differ.
    moved = [(f"optimizer.{index}", tensor.cpu()) for index, tensor in enumerate(tensors)]
    broadcast_parameters(moved, root_rank)
    if not is_root:
        optimizer.load_state_dict(state_dict)  # moves each tensor to its parameter's device


@dataclass(frozen=True)
class _TensorForm:
    """A tensor in a state that is sent before its values.

    Args:
        shape: of it.
        dtype: its type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> torch.Tensor:
        """Return a tensor of this form, without values."""
        return torch.empty(self.shape, dtype=self.dtype)


def _form_of(tensor: torch.Tensor) -> _TensorForm:
    return _TensorForm(tuple(tensor.shape), tensor.dtype)
