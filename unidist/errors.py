"""The exceptions of unidist: the class says who must act.

A message answers four questions: what was asked, what was found, on which rank, what to do.
Recovery code catches these types and never looks into a message.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DeadlockError",
    "DuplicateNameError",
    "ExtraPassError",
    "HorovodInternalError",
    "MismatchError",
    "NotInitializedError",
    "OperationError",
    "PeerLostError",
    "PluginError",
    "RemoteError",
    "StalledError",
    "StateLostError",
    "UnidistError",
    "UsageError",
    "unknown_choice",
]


class UnidistError(Exception):
    """Base class of everything that unidist raises on purpose."""

    if not TYPE_CHECKING:
        # AutoGraph raises errors again with the place in the script, of the same class only if it has this constructor.
        __init__ = Exception.__init__


class HorovodInternalError(UnidistError, RuntimeError):
    """An operation failed: what scripts written for Horovod catch by this name, and may raise themselves.

    unidist raises the classes below, which say why. Elastic training recovers from `PeerLostError`, and from an error
    of exactly this class, which a script raised.
    """


class UsageError(UnidistError, ValueError):
    """The script uses the library wrongly: fix the code. Also a ValueError, because Horovod's scripts catch that."""


class OperationError(UsageError, HorovodInternalError):
    """An operation got arguments that it cannot carry out, and was not started: a root that is no rank, wrong splits.

    Also a HorovodInternalError, because that is what Horovod raises.
    """


class NotInitializedError(OperationError):
    """An operation was called before `init()` or after `shutdown()`."""


class MismatchError(OperationError):
    """The ranks called one operation with different shapes, dtypes, roots or reductions.

    Raised on every rank of the group; the communicator stays usable.
    """


class DeadlockError(MismatchError):
    """The ranks wait for each other in calls that cannot come together; the message has a line for each rank.

    Raised on every rank that waits. Communicators are of no more use afterwards.
    """


class NonfiniteError(UnidistError, ArithmeticError):
    """A gradient is NaN or infinite, and `--on-nonfinite` says that this is an error. On every rank."""


class ReplayError(UnidistError, ArithmeticError):
    """A rank computed the same batch twice, and got other bits, see `--verify replay=N`. On every rank."""


class ExtraPassError(UsageError, AssertionError):
    """A gradient became ready again before the update that was to use it. Also an AssertionError, as Horovod's."""


class DuplicateNameError(OperationError):
    """A named operation was submitted while one of the same name is under way on this rank."""


class ConfigurationError(UnidistError):
    """The command line, the environment or the machine does not allow what was asked: fix the command."""


class CheckpointError(UnidistError, RuntimeError):
    """A checkpoint cannot be written or read: it is damaged, incomplete, of another model, or the disk refuses.

    Raised on every rank when it happens on one. A failed save does not change earlier checkpoints.
    """


class PluginError(UnidistError):
    """A plugin failed; the message names its distribution and the hook."""


class PeerLostError(HorovodInternalError):
    """A peer died, left or aborted the communicator. Elastic training may recover from it.

    Attributes:
        ranks: the ranks (of the communicator that raised) known to be lost; empty when not known.
    """

    def __init__(self, message: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StalledError(PeerLostError):
    """Peers are alive but did not enter an operation within its timeout.

    Also a PeerLostError: for the ranks that waited, the communicator is unusable afterwards.
    """


class StateLostError(UnidistError, RuntimeError):
    """Part of the training state was lost with its ranks, and no other rank has a copy: the elastic job ends."""


class ForgedDataError(UnidistError, RuntimeError):
    """Bytes that should be from a rank of this job were made by somebody else, or changed on their way."""


class RemoteError(UnidistError, RuntimeError):
    """A function that `unidist.run` started raised on another process.

    Attributes:
        rank: the rank on which it was raised.
        remote_traceback: the text of the traceback there.
    """

    def __init__(self, message: str, *, rank: int, remote_traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the keyword arguments when it is pickled: a pool may run inside of a pool."""
        return functools.partial(RemoteError, rank=self.rank, remote_traceback=self.remote_traceback), self.args


def unknown_choice(kind: str, asked: str, choices: Iterable[str], *, hint: str = "") -> ConfigurationError:
    """Return the error for a name that is not among the choices; it lists them and suggests the nearest.

    Args:
        kind: of the requested thing, in words ("strategy", "engine").
        asked: the name that was given.
        choices: every valid name.
        hint: one more sentence that says what to do.
    """
    names = sorted(choices)
    near = difflib.get_close_matches(asked, names, n=1)
    suggestion = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(names) if names else "(none)"
    return ConfigurationError(f"unknown {kind} {asked!r}.{suggestion} Choices: {listed}.{' ' + hint if hint else ''}")
