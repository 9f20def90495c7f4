"""What a script makes once and uses in every generation of an elastic job: bound optimizers, above all.

A context lives as long as a generation of the world. What was bound to one is moved to the next, in the order in which
the script made it, which is the same on every rank: also on one that came later and ran the same script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from unidist.errors import ConfigurationError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context as runtime

if TYPE_CHECKING:
    from unidist.optim.update import Update
    from unidist.runtime.context import Context
    from unidist.runtime_api import RuntimeAPI


class Carried(Protocol):
    """Something that is bound to a context, and can be moved to another one."""

    def move_to(self, context: RuntimeAPI) -> None:
        """Go on in another generation; what was half done in the old one is forgotten. Collective.

        Called after the state was restored and before it is synchronised. The old context is closed already.
        """


def carry(update: Update, bound: Carried) -> None:
    """Move `bound` along with the generations, for as long as it is used; in a job that is not elastic do nothing.

    Args:
        update: of the optimizer in question.
        bound: its binding.
    """
    membership = runtime.current().membership
    if membership is not None:
        membership.carry(bound)


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
