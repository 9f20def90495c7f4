"""Messages between the ranks' monitors and the board of rank 0. They count for `unidist.control.messages.PROTOCOL`."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.control.codec import Message
from unidist.observation import GroupCounts

__all__ = [
    "Answer", "Ask", "Blocked", "Deadlock", "HaveEnded", "RankFailed", "RankLeft", "ReportedCall",
    "Running", "WhoHasEnded",
]  # fmt: skip


@dataclass(frozen=True)
class ReportedCall:
    """A call in which a rank is blocked.

    Args:
        rank: that is.
        key: distinguishes the call from others of the rank.
        group: name of its group.
        kind: of the call.
        number: among its kind.
        name: of a named operation.
        peer: the rank's own number in the group.
        awaited: the ranks that it waits for.
        text: the call in words.
        asked: what the script has called; "": nothing else.
        age: seconds since it began.
    """

    rank: int
    key: int
    group: str
    kind: str
    number: int
    name: str
    peer: int
    awaited: tuple[int, ...]
    text: str
    asked: str
    age: float


# From a rank


class Running(Message):
    """It is in no call for long."""

    rank: int


class Blocked(Message):
    """It is in these calls."""

    rank: int
    calls: tuple[ReportedCall, ...]


class Answer(Message):
    """The answer to `Ask`.

    Args:
        rank: whose it is.
        question: its number.
        blocked: keys of the calls in which the rank still is.
        entered: the calls in question whose counterparts it has entered: rank and key.
        where: line of the script at which it is, or "".
        inside: line of the library that the script has called, or "".
    """

    rank: int
    question: int
    blocked: tuple[int, ...]
    entered: tuple[tuple[int, int], ...]
    where: str
    inside: str


class RankLeft(Message):
    """Its script has ended. The board of a rank 0 that has left passes this on to all ranks.

    Args:
        rank: that has.
        groups: what it has entered.
        ending: how, as the end of a sentence about the rank, with its period.
    """

    rank: int
    groups: dict[str, GroupCounts]
    ending: str


class RankFailed(Message):
    """An operation has ended with a lost peer, the script has raised an exception, or its generation ends.

    The board of a rank 0 that fails passes this on to all ranks.

    Args:
        rank: that has failed.
        ending: how, as in `RankLeft`; "": others have failed before.
    """

    rank: int
    ending: str


class WhoHasEnded(Message):
    """Which of these ranks have ended? -> HaveEnded."""

    rank: int
    ranks: tuple[int, ...]


# To a rank


class Ask(Message):
    """What do you do, and have you entered these calls? -> Answer."""

    question: int
    calls: tuple[ReportedCall, ...]


class HaveEnded(Message):
    """These ranks have, and how."""

    ranks: tuple[int, ...]
    endings: tuple[str, ...]


class Deadlock(Message):
    """The ranks wait for each other."""

    text: str
