"""The agreement of the ranks at a commit, in one exchange of a few bytes."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

if TYPE_CHECKING:
    from unidist.runtime.context import Context


@dataclass(frozen=True)
class Wishes:
    """The requests of one rank at a commit or, after the agreement, those of any rank.

    Args:
        change: the world is to change now.
        checkpoint: a durable checkpoint is to be made of this commit.
        leaving: this rank will not be in the next world.
        staying: it will be.
    """

    change: bool = False
    checkpoint: bool = False
    leaving: bool = False
    staying: bool = True


class CommitAgreement:
    """Tells whether any rank wants something: all of them act at the same step. Made once for each context."""

    def __init__(self, runtime: Context) -> None:
        self._communicator = runtime.duplicate_world()
        self._recorder = runtime.recorder
        self._flags = Buffer.allocate(len(astuple(Wishes())), DType.UINT8)

    def on(self, own: Wishes) -> Wishes:
        """Return what any rank wants. Collective."""
        view = self._flags.bytes()
        view[:] = bytes(astuple(own))
        self._recorder.wait(self._communicator.allreduce(self._flags, self._flags, op=ReduceOp.MAX))
        return Wishes(*map(bool, view))

    def close(self) -> None:
        """Give back the communicator."""
        self._communicator.close()


def agree_at_commit(runtime: Context, *, checkpoint: bool = False) -> Wishes:
    """Return what the ranks agree on now. Collective in an elastic job; a step has been taken.

    In any other job nothing but checkpoints can be wanted.

    Args:
        runtime: the present context.
        checkpoint: this rank wants a durable checkpoint.
    """
    link = None if runtime.membership is None else runtime.membership.link
    is_alone = runtime.topology.world_size == 1
    own = Wishes(checkpoint=checkpoint)
    if link is not None:
        link.step()
        if is_alone:
            link.check()
        is_leaving = link.worker in link.leaving_workers
        own = Wishes(link.change_is_wanted, checkpoint, is_leaving, not is_leaving)
    return own if is_alone else runtime.owned(CommitAgreement).on(own)
