"""Steps around the division of a model over ranks: equal values before, adapting the optimizer after.

A strategy cuts parameters in place (the object stays, its `data` is a part), or leaves whole ones to other ranks. The
optimizer was made for all of them: here it forgets what is elsewhere, and its state is cut like the parameters; except
where it looks at whole tensors, whose state stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from unidist.checkpoint.format.interface import PlacesParameters
from unidist.errors import UsageError
from unidist.mesh import REPLICA_AXES
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import dtype_of, memory_kind
from unidist_torch.operations.functions import broadcast_parameters, give_optimizer_state
from unidist_torch.optimizer.elementwise import groups_of_whole_tensors
from unidist_torch.optimizer.gathered_step import CutTensor
from unidist_torch.parameter_states import ParameterStates

if TYPE_CHECKING:
    from unidist.runtime.context import Context


def prepare_to_divide(model: torch.nn.Module, optimizer: torch.optim.Optimizer, runtime: Context) -> None:
    """Broadcast rank 0's values of the whole model, and form the groups of the mesh. Collective over all ranks."""
    framework = TorchFramework()
    state = framework.model_state(model)
    broadcast_parameters(state, root_rank=0)
    if next(iter(ParameterStates(optimizer)), None) is not None:
        give_optimizer_state(optimizer, root_rank=0)
    for kind in sorted({"host"} | {memory_kind(tensor).partition(":")[0] for tensor in state.values()}):
        runtime.divide(memory=kind)


@dataclass(frozen=True)
class FollowedModel:
    """What an optimizer has of a divided model.

    Args:
        parts: identities of the parameters that are cut, or whose gradients are exchanged with some of the replicas
            only: a norm of all gradients adds up those of the other ranks.
        gathered: those that are cut and that the optimizer looks at as a whole.
    """

    parts: frozenset[int] = frozenset()
    gathered: Sequence[CutTensor] = ()


def follow_model(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], places: PlacesParameters
) -> FollowedModel:
    """Turn the optimizer of the whole model into that of this rank's part.

    Args:
        optimizer: not bound yet.
        names: the parameters of this rank's part, by path.
        places: where they belong in the whole model.

    Raises:
        UsageError: the optimizer looks at several parameters together, or needs one as a whole that cannot be gathered.
    """
    cut = {}
    for path, parameter in names.items():
        placement = places.placement(path, tuple(parameter.shape), dtype_of(parameter))
        if placement.shape != tuple(parameter.shape):
            cut[parameter] = placement
    shapes = {id(parameter): placement.shape for parameter, placement in cut.items()}
    whole = groups_of_whole_tensors(optimizer, shapes=shapes)  # asked in any case: it may refuse
    groups = [group["params"] for group, is_whole in zip(optimizer.param_groups, whole, strict=True) if is_whole]
    paths = {id(parameter): path for path, parameter in names.items()}
    gathered = [
        CutTensor(parameter, cut[parameter], _axis_of(type(optimizer), paths[id(parameter)], places))
        for group in groups
        for parameter in group
        if id(parameter) in shapes
    ]
    held = {id(parameter) for parameter in names.values()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in held]
    states = ParameterStates(optimizer)
    for parameter in [each for each in states if id(each) not in held]:
        states.take(parameter)
    are_gathered = {id(each.parameter) for each in gathered}
    for parameter, placement in cut.items():
        if id(parameter) in are_gathered:
            continue
        state = states.of(parameter)
        for slot, value in states.slots(parameter).items():
            if tuple(value.shape) == placement.shape:
                for dim, indices in enumerate(placement.indices):
                    if len(indices) != value.shape[dim]:
                        value = value.index_select(dim, torch.tensor(indices, device=value.device))
                state[slot] = value.clone()
    grouped = {id(parameter) for path, parameter in names.items() if places.gradient_axis(path) != REPLICA_AXES}
    return FollowedModel(frozenset(id(parameter) for parameter in cut) | grouped, gathered)


def _axis_of(kind: type[torch.optim.Optimizer], path: str, places: PlacesParameters) -> str:
    axis = places.cut_axis(path)
    if axis is None:
        raise UsageError(
            f"{kind.__name__} looks at a parameter's whole tensor, and {path!r} is cut over ranks by a strategy that "
            "does not say over which. Use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, ...), or pipeline and "
            "zero, which leave parameters whole"
        )
    return axis
