"""The ways of a pipeline's messages, so that no order of them can be a deadlock.

An engine on which a send holds up what its rank issues afterwards (`MessageOrder.MATCHED`: NCCL) would stop where one
rank sends an activation, its neighbour a gradient, and neither receives. So each pair of a sender and a receiver gets a
communicator of its own. Nothing but the messages of one schedule, in the order in which both ranks list them, is issued
there.

Where an engine runs several communicators one after the other, too (a single connection to the device, shared
resources), that is no deadlock either: ranks issue all operations in the order of their lists, in which, as
`schedules.validation` has checked, every rank could wait for each message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from unidist.buffer import Buffer
from unidist.communicator import Communicator, MessageOrder, Work
from unidist.errors import ConfigurationError

Route = tuple[int, int]
"""Sender and receiver, ranks of the pipeline."""


class Routes:
    """Messages over one kind of memory. Creation is collective over the pipeline.

    Args:
        kind: of memory, for messages.
        communicator: along the pipeline.
        routes: that messages will take; the same on every rank.
        split: see `Subgroups.split`.

    Attributes:
        communicator: the one given.
        matched: sends and receives have to be issued in the order of the schedule.

    Raises:
        ConfigurationError: the engine has no messages.
    """

    def __init__(
        self,
        kind: str,
        communicator: Communicator,
        routes: Collection[Route],
        split: Callable[[Communicator, Sequence[int]], Communicator | None],
    ) -> None:
        order = communicator.capabilities.messages
        if communicator.size > 1 and order is MessageOrder.NONE:
            raise ConfigurationError(
                f"pipeline: stages send each other messages, and the engine of {kind} memory "
                f"({communicator.description}) has collectives only. Use another one: --engine gloo"
            )
        self.communicator = communicator
        self._own: dict[Route, Communicator] = {}
        self.matched = order is MessageOrder.MATCHED
        if self.matched:
            rank = communicator.rank
            for together in _disjoint(routes):
                route = next((each for each in together if rank in each), None)
                made = split(communicator, route or ())
                if route is not None and made is not None:
                    self._own[route] = made

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Begin to send a buffer, see `Communicator.send`."""
        if self.matched:
            return self._own[self.communicator.rank, to].send(buffer, to=1)
        return self.communicator.send(buffer, to=to)

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """Begin to receive a buffer, see `Communicator.recv`."""
        if self.matched:
            return self._own[source, self.communicator.rank].recv(buffer, source=0)
        return self.communicator.recv(buffer, source=source)


def routes_between(placement: Sequence[int]) -> list[Route]:
    """Return the routes of activations and gradients, for the rank of each stage."""
    pairs = {(here, there) for here, there in pairwise(placement) if here != there}
    return sorted(pairs | {(there, here) for here, there in pairs})


def _disjoint(routes: Iterable[Route]) -> Iterator[list[Route]]:
    """Divide routes into lists of such that have no rank in common, few and the same on every rank."""
    left = sorted(set(routes))
    while left:
        together: list[Route] = []
        taken: set[int] = set()
        for route in left:
            if taken.isdisjoint(route):
                together.append(route)
                taken.update(route)
        yield together
        left = [route for route in left if route not in together]
