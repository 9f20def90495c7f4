"""Horovod's arguments that need PyTorch: names of parameters, and tensors in groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unidist.horovod_api.arguments import Position

NamedParameters = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None


def names_of(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters) -> dict[str, torch.Tensor] | None:
    """Return the parameters by name, or None if the script gave no names.

    Raises:
        ValueError: not pairs of name and parameter, a name twice, or a parameter of the optimizer without a name.
    """
    if named_parameters is None:
        return None
    pairs: list[Any] = list(named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually model.named_parameters()"
        )
    seen: set[str] = set()
    duplicates = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]  # adds, and is false
    if duplicates:
        raise ValueError(f"parameter names in named_parameters must be unique; found twice: {', '.join(duplicates)}")
    named = {id(parameter) for _, parameter in pairs}
    unnamed = [
        f"{position} of shape {tuple(parameter.shape)}"
        for position, parameter in enumerate(_parameters(optimizer))
        if id(parameter) not in named
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters does not name every parameter of the optimizer; missing: {'; '.join(unnamed)}. Pass the "
            "names of all of its parameters, or none"
        )
    return dict(pairs)


def named(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[torch.Tensor, str]:
    """Return the name of each parameter.

    Args:
        optimizer: its parameters.
        names: those that the script gave, by the identity of a parameter. The others get Horovod's.
    """
    return {
        parameter: names.get(id(parameter), f"allreduce.noname.{group_number}.{number}")
        for group_number, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    }


def position_in(optimizer: torch.optim.Optimizer) -> Position:
    """Return a function that finds a tensor of `groups` among the optimizer's parameters."""
    positions = {id(parameter): position for position, parameter in enumerate(_parameters(optimizer))}

    def position(member: Any) -> int | None:
        if not isinstance(member, torch.Tensor):
            raise ValueError(f"groups must consist of torch.Tensor, not {type(member).__name__}")
        return positions.get(id(member))

    return position


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
