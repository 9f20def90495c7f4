"""The parameters of one optimizer, described to the other ranks and compared with theirs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unidist.errors import ConfigurationError


@dataclass(frozen=True)
class Described:
    """One parameter as this rank has it.

    Args:
        name: its path, or a number.
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
    """A rank's description of its optimizer for the other ranks.

    Args:
        choices: options of its gradient exchange, as text.
        parameters: all of them, by position.
    """

    choices: str
    parameters: tuple[Described, ...]

    def sparse_positions(self) -> set[int]:
        """Return the positions of the parameters that are sparse here."""
        return {position for position, parameter in enumerate(self.parameters) if parameter.sparse}


def check_equal(everyone: Sequence[Description], members: Sequence[int], rank: int) -> None:
    """Raise on every rank where the optimizers differ, with the first difference.

    Args:
        everyone: the descriptions, by rank in the group.
        members: the world ranks of the group.
        rank: this process's world rank.

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


def trained_anywhere(everyone: Sequence[Description], position: int) -> bool:
    """Return whether the parameter at `position` requires a gradient on any rank."""
    return any(description.parameters[position].trained for description in everyone)


def sparse_anywhere(everyone: Sequence[Description]) -> set[int]:
    """Return the positions of the parameters that are sparse on any rank."""
    return set().union(*(description.sparse_positions() for description in everyone))
