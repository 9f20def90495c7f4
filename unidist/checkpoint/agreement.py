"""Agreement of all ranks at the end of each phase of a save or a load: an error on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unidist.communicator import Communicator
from unidist.errors import CheckpointError, UnidistError
from unidist.negotiation.objects import gather_objects


@dataclass(frozen=True)
class Failure:
    """An error of a rank, as a message.

    Args:
        text: the message.
        of_disk: the file system failed (it is full, for example); the request itself is valid.
    """

    text: str
    of_disk: bool


class DiskError(CheckpointError):
    """The file system refused; `on_error="warn"` is about these."""


def agree(
    communicator: Communicator, value: Any, error: Exception | None, what: str, *, if_disk: str = ""
) -> list[Any]:
    """Return the values of all ranks, or raise on every rank if one has an error. Collective.

    Args:
        communicator: over all ranks.
        value: this rank's; anything that can be pickled.
        error: of this rank.
        what: what was being done, for messages ("the checkpoint /data/c cannot be saved").
        if_disk: what can be done about it if it is the file system that refuses; the same on every rank.

    Raises:
        CheckpointError: another rank has an error, or this rank's was no error of unidist's.
        UnidistError: this rank's own.
    """
    failure = None if error is None else _describe(error)
    everyone: list[tuple[Any, Failure | None]] = gather_objects(
        communicator, (value if error is None else None, failure)
    )
    failed = [(rank, each) for rank, (_, each) in enumerate(everyone) if each is not None]
    if not failed:
        return [each for each, _ in everyone]
    if isinstance(error, UnidistError):
        raise error
    raise _of_all(failed, communicator, what, if_disk) from error


def _of_all(
    failed: Sequence[tuple[int, Failure]], communicator: Communicator, what: str, if_disk: str
) -> CheckpointError:
    # All name the same rank: one whose disk is full is named before one that merely noticed the consequences.
    rank, failure = min(failed, key=lambda item: (not item[1].of_disk, item[0]))
    kind = DiskError if all(each.of_disk for _, each in failed) else CheckpointError
    place = f" on rank {communicator.members[rank]}" if communicator.size > 1 else ""
    advice = f". {if_disk}" if failure.of_disk and if_disk else ""
    return kind(f"{what}{place}: {failure.text}{advice}")


def _describe(error: Exception) -> Failure:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return Failure(f"{error.strerror or error}{where}", of_disk=True)
    if isinstance(error, UnidistError):
        return Failure(str(error), of_disk=isinstance(error, DiskError))
    return Failure(f"{type(error).__name__}: {error}", of_disk=False)
