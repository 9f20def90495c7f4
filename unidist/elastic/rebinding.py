"""Rebinds what a script makes once and uses in every generation of an elastic job, such as distributed optimizers.

A context lives as long as one generation of the world. What was bound to the old context is bound to the new one, in
the order in which the script made it. That order is the same on every rank, including ranks that joined later, because
all of them ran the same script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from unidist.errors import ConfigurationError
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context as runtime

if TYPE_CHECKING:
    from unidist.runtime.context import Context
    from unidist.runtime_api import RuntimeAPI


class Rebindable(Protocol):
    """An object that is bound to a context and can be bound to another one, such as an optimizer's binding."""

    def rebind(self, context: RuntimeAPI) -> None:
        """Continue in the context of a new generation; unfinished work of the old one is discarded. Collective.

        Called before the state is restored and synchronized. The old context is closed already.
        """


def follow_generations(rebindable: Rebindable) -> None:
    """Rebind an object in each new generation, as long as it is alive. Does nothing in a job that is not elastic."""
    membership = runtime.current().membership
    if membership is not None:
        membership.add_rebindable(rebindable)


def rebind_all(context: Context) -> None:
    """Bind everything passed to `follow_generations` to a new context. Collective.

    Raises:
        ConfigurationError: the ranks have made different objects.
    """
    membership = context.membership
    assert membership is not None, "only elastic jobs have generations"
    rebindables = membership.rebindables()
    names = [type(item).__qualname__ for item in rebindables]
    everyone: list[list[str]] = gather_objects(context.world, names)
    if any(other != names for other in everyone):
        listed = "; ".join(f"rank {rank}: {len(other)}" for rank, other in enumerate(everyone))
        raise ConfigurationError(
            f"the ranks have made different numbers of distributed optimizers ({listed}) before the elastic function "
            "began. Make the same ones on every rank, outside of that function."
        )
    for item in rebindables:
        item.rebind(context)
