"""What rank 0's board decides from the messages of the ranks, in every order in which they can come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from unidist.control import Message, Send
from unidist.waits.board import Board
from unidist.waits.detection import UNEVEN_BATCHES
from unidist.waits.messages import (
    Answer,
    Ask,
    Blocked,
    Deadlock,
    HaveEnded,
    RankFailed,
    RankLeft,
    ReportedCall,
    Running,
    WhoHasEnded,
)


class Ranks:
    """The messages of some ranks to one board; the peer of a rank is its number plus ten."""

    def __init__(self, size: int) -> None:
        self.board = Board(0.0, lambda line: None)
        self.size = size
        self.now = 0.0
        self.sent: list[tuple[int, Message]] = []
        for rank in range(size):
            self.says(Running(rank))

    def says(self, message: Any) -> None:
        self._keep(self.board.received(message.rank + 10, message, self.now))

    def waits(self, rank: int, awaited: Sequence[int]) -> None:
        text = f"allreduce of rank {rank}"
        self.says(
            Blocked(rank, (ReportedCall(rank, 1, "world", "named", 0, "loss", rank, tuple(awaited), text, "", 2.0),))
        )

    def answers(self, rank: int, *, blocked: bool, entered: Sequence[int] = ()) -> None:
        question = max((message.question for _, message in self.sent if isinstance(message, Ask)), default=0)
        self.says(Answer(rank, question, (1,) if blocked else (), tuple((other, 1) for other in entered), "", ""))

    def leaves(self, rank: int) -> None:
        self.says(RankLeft(rank, {}, "has ended."))

    def dies(self, rank: int) -> None:
        self._keep(self.board.lost(rank + 10, "the connection ended", self.now))

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self._keep(self.board.tick(self.now))

    def told(self, kind: type[Message]) -> list[int]:
        return [peer - 10 for peer, message in self.sent if isinstance(message, kind)]

    def _keep(self, actions: Any) -> None:
        self.sent += [(each.peer, each.message) for each in actions if isinstance(each, Send)]


def test_ranks_that_wait_for_each_other_are_told() -> None:
    ranks = Ranks(2)
    ranks.waits(0, [1])
    ranks.waits(1, [0])
    ranks.passes(0.5)
    ranks.answers(0, blocked=True)
    ranks.answers(1, blocked=True)
    assert ranks.told(Deadlock) == [0, 1]


def test_the_others_are_told_of_a_rank_that_is_gone() -> None:
    ranks = Ranks(3)
    ranks.dies(1)
    assert ranks.told(RankFailed) == [0, 2]
    ranks.leaves(2)
    ranks.dies(2)  # its script has ended
    assert ranks.told(RankFailed) == [0, 2]


def test_a_wait_for_a_rank_whose_script_has_ended_is_a_deadlock() -> None:
    ranks = Ranks(2)
    ranks.waits(0, [1])
    ranks.leaves(1)
    ranks.passes(0.5)
    ranks.answers(0, blocked=True)
    assert ranks.told(Deadlock) == [0, 1]


_EVENTS = {
    "dies": lambda ranks: ranks.dies(2),
    "fails": lambda ranks: ranks.says(RankFailed(0, "")),
    "answers 0": lambda ranks: ranks.answers(0, blocked=True, entered=[1]),
    "answers 1": lambda ranks: ranks.answers(1, blocked=True, entered=[0]),
    "time": lambda ranks: ranks.passes(3.0),
}


@pytest.mark.parametrize("order", list(itertools.permutations(_EVENTS)), ids=" ".join)
def test_the_loss_of_a_slow_rank_is_no_deadlock_of_the_others(order: Sequence[str]) -> None:
    """Ranks 0 and 1 wait for rank 2, which is slow and then dies; then their operations fail one after the other."""
    ranks = Ranks(3)
    ranks.waits(0, [1, 2])
    ranks.waits(1, [0, 2])
    ranks.passes(0.5)
    assert ranks.told(Ask) == [0, 1, 2]
    if order.index("fails") > min(order.index("answers 0"), order.index("answers 1")):
        ranks.answers(2, blocked=False)  # it had time to
    for event in order:
        if event.startswith("answers") and order.index("fails") < order.index(event):
            continue  # a rank that has failed answers so
        _EVENTS[event](ranks)
    ranks.passes(6.0)
    assert not ranks.told(Deadlock)


def test_a_rank_that_asks_who_has_ended_gets_the_answer_when_it_is_known() -> None:
    ranks = Ranks(4)
    ranks.says(WhoHasEnded(0, (2, 3)))
    assert not ranks.told(HaveEnded)
    ranks.dies(3)
    assert not ranks.told(HaveEnded)
    ranks.leaves(2)
    assert ranks.sent[-1] == (10, HaveEnded((2,), (f"has ended. {UNEVEN_BATCHES}",)))
    assert ranks.told(HaveEnded) == [0]


def test_a_rank_that_asks_for_one_that_neither_ended_nor_died_is_answered_soon() -> None:
    ranks = Ranks(3)
    ranks.says(WhoHasEnded(0, (2,)))
    ranks.passes(0.5)
    assert ranks.sent == [(10, HaveEnded((), ()))]


def test_what_rank_0_leaves_behind_goes_to_all_others() -> None:
    ranks = Ranks(3)
    ranks.leaves(0)
    assert ranks.told(RankLeft) == [1, 2]
