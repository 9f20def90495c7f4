"""The parameters of one optimizer, described to the other ranks and compared with theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unidist.errors import ConfigurationError
from unidist_torch.memory import dtype_of, is_dense


@dataclass(frozen=True)
class Described:
    """One parameter as this rank has it.

    Args:
        name: its path, or "parameter.<position>".
        shape: of the parameter.
        dtype: name of its element type.
        trained: it requires a gradient here.
        sparse: it has a sparse gradient here, which was not agreed on before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    sparse: bool


@dataclass(frozen=True)
class Description:
    """What one rank tells the others of its optimizer.

    Args:
        choices: how it exchanges gradients, in words.
        parameters: all of them, by position.
    """

    choices: str
    parameters: tuple[Described, ...]


def describe(parameter: torch.Tensor, position: int, names: Mapping[int, str], *, sparse: bool) -> Described:
    """Describe a parameter; `names` is by identity."""
    return Described(
        names.get(id(parameter), f"parameter.{position}"),
        tuple(parameter.shape),
        str(dtype_of(parameter)),
        bool(parameter.requires_grad),
        sparse,
    )


def check_alike(everyone: Sequence[Description], members: Sequence[int], rank: int) -> None:
    """Raise on every rank where the optimizers differ, with the first difference.

    Args:
        everyone: the descriptions by rank.
        members: the ranks' numbers.
        rank: this one's number.

    Raises:
        ConfigurationError: what differs, and on which ranks.
    """
    first = everyone[0]
    counts = [len(description.parameters) for description in everyone]
    if len(set(counts)) > 1:
        listed = ", ".join(f"rank {other}: {count}" for other, count in zip(members, counts, strict=True))
        raise ConfigurationError(
            f"the optimizers have different numbers of parameters ({listed}). Build one model on every rank."
        )
    for other, description in zip(members, everyone, strict=True):
        if description.choices != first.choices:
            raise ConfigurationError(
                f"the optimizers are to exchange gradients differently: {first.choices} on rank {members[0]}, but "
                f"{description.choices} on rank {other} (seen on rank {rank}). Give every rank the same arguments."
            )
    for position, wanted in enumerate(first.parameters):
        for other, description in zip(members, everyone, strict=True):
            found = description.parameters[position]
            if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                raise ConfigurationError(
                    f"parameter {wanted.name!r} is {wanted.dtype}{list(wanted.shape)} on rank {members[0]}, but on "
                    f"rank {other} there is {found.name!r}, {found.dtype}{list(found.shape)}, in its place "
                    f"(seen on rank {rank}). Build one model on every rank."
                )


def on_any(everyone: Sequence[Description], position: int, what: str) -> bool:
    """Say whether the parameter at `position` is `what` ("trained", "sparse") on any rank."""
    return any(getattr(description.parameters[position], what) for description in everyone)


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the flat memory in the parameter's shape and memory order, which fused optimizers rely on."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)
