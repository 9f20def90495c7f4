"""What a script makes once and uses in every generation of an elastic job: bound optimizers, above all.

A context lives as long as a generation of the world. What was bound to one is moved to the next, in the order in which
the script made it, which is the same on every rank: also on one that came later and ran the same script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from unidist.errors import ConfigurationError
from unidist.negotiation.objects import gather_objects
from unidist.strategy.elastic_support import check_plan
from unidist.strategy.interface import Plan

if TYPE_CHECKING:
    from unidist.optim.update import Update
    from unidist.runtime.context import Context


class Carried(Protocol):
    """Something that is bound to a context, and can be moved to another one."""

    def move_to(self, context: Context) -> None:
        """Go on in another generation; what was half done in the old one is forgotten. Collective.

        Called after the state was restored and before it is synchronised. The old context is closed already.
        """


def carry(update: Update, bound: Carried) -> None:
    """Move `bound` along with the generations, for as long as it is used; in a job that is not elastic do nothing.

    Args:
        update: of the optimizer in question.
        bound: its binding.

    Raises:
        ConfigurationError: see `check_movable`.
    """
    check_movable(update)
    if update.context.membership is not None:
        update.context.membership.carry(bound)


def check_movable(update: Update) -> None:
    """Make sure that an optimizer can be used in an elastic job, if this is one.

    Raises:
        ConfigurationError: it is spread in a way that does not survive the loss of a rank.
    """
    if update.context.membership is None:
        return
    check_plan(Plan(tuple(update.strategies), update.context.plan.mesh))
    if update.options.process_set is not None:
        raise ConfigurationError(
            "this job is elastic, and the optimizer is used with a process set, whose ranks may be lost. Leave "
            "process_set out, or launch without --min-np, --max-np and --host-discovery-script."
        )


def move_all(context: Context) -> None:
    """Move what is carried to a new context. Collective.

    Raises:
        ConfigurationError: the ranks carry different things.
    """
    membership = context.membership
    assert membership is not None, "only elastic jobs have generations"
    carried = membership.carried()
    names = [type(item).__qualname__ for item in carried]
    everyone: list[list[str]] = gather_objects(context.world, names)
    if any(other != names for other in everyone):
        listed = "; ".join(f"rank {rank}: {len(other)}" for rank, other in enumerate(everyone))
        raise ConfigurationError(
            f"the ranks have made different numbers of distributed optimizers ({listed}) before the elastic function "
            "began. Make them alike on every rank, outside of that function."
        )
    for item in carried:
        item.move_to(context)
