"""Stacks of the calls in which each thread of this process is blocked; a push and a pop take well under 1 us.

A `Call` is one blocking operation of a group. A label says it in the words of the script: `optimizer.state_dict()`.
Nothing here waits or looks at a clock; the monitor's thread looks at the stacks now and then.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

__all__ = ["Call", "Group", "calling"]

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["collective", "send", "recv", "named", "join"]


class Group:
    """The calls of this rank on one group of ranks: how many of each kind it has entered.

    Args:
        name: the same on all ranks of the group, and of no other group.
        members: world ranks, by group rank.
        description: for messages.

    Attributes:
        collectives: how many this rank has entered.
        sent: messages sent, by group rank of the receiver.
        received: messages asked for, by group rank of the sender.
        is_pending: for a group with named operations: whether this rank has submitted one of this name that is
            not done; else None.
        joined: this rank is in `join`.
        thread: the one that entered the last collective or message; 0: none yet.
        splits: how often the group was divided.
    """

    def __init__(self, name: str, members: tuple[int, ...], description: str) -> None:
        self.name = name
        self.members = members
        self.description = description
        self.collectives = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.is_pending: Callable[[str], bool] | None = None
        self.joined = False
        self.thread = 0
        self.splits = 0

    def counts(self) -> dict[str, Any]:
        """Return what `restore` needs of a rank that has left, for a message."""
        sent = {str(peer): count for peer, count in self.sent.items()}
        received = {str(peer): count for peer, count in self.received.items()}
        return {"collectives": self.collectives, "sent": sent, "received": received}

    def restore(self, counts: dict[str, Any]) -> None:
        """Take over the counts of another rank, as `counts` returned them there."""
        self.collectives = counts["collectives"]
        self.sent = {int(peer): count for peer, count in counts["sent"].items()}
        self.received = {int(peer): count for peer, count in counts["received"].items()}

    def entered(self, kind: Kind, number: int, name: str, peer: int) -> bool:
        """Return whether this rank has entered the counterpart of a call that another rank is blocked in.

        Args:
            kind: of the other rank's call.
            number: of that call among its kind (to one peer), from 1.
            name: of a named operation.
            peer: the other rank, by its group rank.
        """
        if kind == "collective":
            return self.collectives >= number
        if kind == "recv":
            return self.sent.get(peer, 0) >= number
        if kind == "send":
            return self.received.get(peer, 0) >= number
        if kind == "join":
            return self.joined
        return self.joined or (self.is_pending is not None and self.is_pending(name))


@dataclass(slots=True, eq=False)
class Call:
    """One blocking call on a group. Compared by identity.

    Args:
        group: on which.
        kind: decides what it waits for.
        operation: in words ("allreduce", "send").
        number: among its kind, from 1; 0 for named operations.
        name: of a named operation.
        peer: the other rank of a message, by its group rank; -1: the whole group.
        nbytes: to be moved.
    """

    group: Group
    kind: Kind
    operation: str
    number: int = 0
    name: str = ""
    peer: int = -1
    nbytes: int = 0


Stack = list["Call | str"]

stacks: dict[int, Stack] = {}
"""By thread identifier: labels and calls, the outermost first."""


def stack() -> Stack:
    """Return the stack of this thread."""
    ident = threading.get_ident()
    found = stacks.get(ident)
    if found is None:
        found = stacks[ident] = []
    return found


class calling:  # noqa: N801 - reads as a statement
    """Name, in the script's words, the call during which this thread may wait for other ranks.

    For deadlock reports: `with calling("optimizer.state_dict()"): ...`, or as a decorator. Costs half a microsecond.
    Nested ones are all reported, the outermost first.

    Args:
        label: the call as the script writes it, or the part of the model ("gather of layers.3").
    """

    __slots__ = ("_label", "_stack")

    def __init__(self, label: str) -> None:
        self._label = label

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call of it is named."""
        label = self._label

        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> R:
            with calling(label):
                return function(*args, **kwargs)

        return named

    def __enter__(self) -> Self:
        self._stack = stack()
        self._stack.append(self._label)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.pop()


os.register_at_fork(after_in_child=stacks.clear)  # a forked child is no rank
