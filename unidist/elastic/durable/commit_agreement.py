"""The agreement of the ranks at a commit, in one exchange of a few bytes."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

if TYPE_CHECKING:
    from unidist.runtime.context import Context


@dataclass(frozen=True)
class CommitRequests:
    """The requests of one rank at a commit or, after the agreement, those of any rank.

    Args:
        change: change the world now.
        checkpoint: make a durable checkpoint of this commit.
        leaving: this rank will not be in the next world.
        staying: this rank will be in the next world.
        added: hosts were added; `removed` that some were.
    """

    change: bool = False
    checkpoint: bool = False
    leaving: bool = False
    staying: bool = True
    added: bool = False
    removed: bool = False


class CommitAgreement:
    """Combines the requests of all ranks, so that all of them act at the same step. Made once for each context."""

    def __init__(self, runtime: Context) -> None:
        self._communicator = runtime.duplicate_world()
        self._recorder = runtime.recorder
        self._flags = Buffer.allocate(len(astuple(CommitRequests())), DType.UINT8)

    def on(self, own: CommitRequests) -> CommitRequests:
        """Return the requests of any rank. Collective."""
        view = self._flags.bytes()
        view[:] = bytes(astuple(own))
        self._recorder.wait(self._communicator.allreduce(self._flags, self._flags, op=ReduceOp.MAX))
        return CommitRequests(*map(bool, view))

    def close(self) -> None:
        """Release the communicator."""
        self._communicator.close()


def agree_at_commit(
    runtime: Context, *, checkpoint: bool = False, change: bool = False, added: bool = False, removed: bool = False
) -> CommitRequests:
    """Return the requests of any rank. Collective; called after each step.

    Args:
        runtime: the present context.
        checkpoint: this rank wants a durable checkpoint.
        change: this rank was told to change the world.
        added: it was told that hosts were added.
        removed: it was told that hosts were removed.
    """
    link = None if runtime.membership is None else runtime.membership.link
    is_alone = runtime.topology.world_size == 1
    own = CommitRequests(change, checkpoint, added=added, removed=removed)
    if link is not None:
        link.step()
        if is_alone:
            link.check()
        is_leaving = link.worker in link.leaving_workers
        own = CommitRequests(change, checkpoint, is_leaving, not is_leaving, added, removed)
    return own if is_alone else runtime.owned(CommitAgreement).on(own)
