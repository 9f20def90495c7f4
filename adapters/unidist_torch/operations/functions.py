"""Objects, parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from unidist.horovod_api.scope import scope_of
from unidist.negotiation import allgather_object as allgather_pickled
from unidist.negotiation import broadcast_object as broadcast_pickled
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_torch.operations.movement import start_broadcast


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
    items = (
        params.items()
        if isinstance(params, Mapping)
        else [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(params)]
    )
    handles = [
        start_broadcast(value, root_rank, f"broadcast_parameters.{name}", process_set, background=False)
        for name, value in items
        if isinstance(value, torch.Tensor)
    ]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the state and the options (learning rates, ...) of rank `root_rank`'s optimizer.

    A rank whose optimizer has no state yet takes it over, and one that has some replaces it. Nothing is stepped.

    Args:
        optimizer: of the same kind and parameters on every rank; any stock one but LBFGS.
        root_rank: whose state it is.
        model: accepted for Horovod's sake; it is not used.

    Raises:
        ValueError: it is `torch.optim.LBFGS`. Scripts of Horovod catch that; an elastic state takes it.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "broadcast_optimizer_state(LBFGS): as in Horovod, its state is not broadcast. Give every rank the same "
            "one by optimizer.load_state_dict(broadcast_object(optimizer.state_dict()))"
        )
    give_optimizer_state(optimizer, root_rank)


def give_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Do what `broadcast_optimizer_state` does, for any stock optimizer. Collective."""
    runtime = context.current()
    is_root = runtime.topology.rank == root_rank
    state_dict = optimizer.state_dict()
    outline = _outline(state_dict) if is_root else None
    outline = broadcast_pickled(runtime.negotiator, outline, root=root_rank, name="broadcast_optimizer_state")
    assert outline is not None
    if not is_root:
        state_dict = _filled(outline)
    tensors = [
        (f"{index}.{key}", value)
        for index, entry in sorted(state_dict["state"].items(), key=lambda item: str(item[0]))
        for key, value in sorted(entry.items())
        if isinstance(value, torch.Tensor)
    ]
    # In host memory while they travel: the ranks' devices differ.
    moved = [(name, tensor if tensor.device.type == "cpu" else tensor.cpu()) for name, tensor in tensors]
    broadcast_parameters([(f"optimizer.{name}", tensor) for name, tensor in moved], root_rank)
    if not is_root:
        optimizer.load_state_dict(state_dict)  # moves each tensor to its parameter's device


def _outline(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with (shape, dtype) in place of every tensor; those in lists (LBFGS) travel as they are."""
    state = {
        index: {
            key: ("tensor", tuple(value.shape), value.dtype)
            if isinstance(value, torch.Tensor)
            else ("value", _on_host(value))
            for key, value in entry.items()
        }
        for index, entry in state_dict["state"].items()
    }
    return {"state": state, "param_groups": state_dict["param_groups"]}


def _on_host(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)


def _filled(outline: dict[str, Any]) -> dict[str, Any]:
    """Return a state with empty tensors in place of every (shape, dtype)."""
    state = {
        index: {
            key: torch.empty(item[1], dtype=item[2]) if item[0] == "tensor" else item[1] for key, item in entry.items()
        }
        for index, entry in outline["state"].items()
    }
    return {"state": state, "param_groups": outline["param_groups"]}
