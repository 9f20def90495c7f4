"""What rank 0's board decides from the messages of the ranks, in every order in which they can come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from unidist.control import Message, Send
from unidist.waits.board import Board


class Ranks:
    """The messages of some ranks to one board; the peer of a rank is its number plus ten."""

    def __init__(self, size: int) -> None:
        self.board = Board(0.0, lambda line: None)
        self.size = size
        self.now = 0.0
        self.sent: list[tuple[int, Message]] = []
        for rank in range(size):
            self.says(rank, {"type": "running"})

    def says(self, rank: int, message: Message) -> None:
        self._keep(self.board.received(rank + 10, {"rank": rank, **message}, self.now))

    def waits(self, rank: int, awaited: Sequence[int]) -> None:
        call = {
            "rank": rank, "key": 1, "group": "world", "kind": "named", "number": 0, "name": "loss", "peer": rank,
            "awaited": list(awaited), "text": f"allreduce of rank {rank}", "asked": "", "age": 2.0,
        }  # fmt: skip
        self.says(rank, {"type": "blocked", "calls": [call]})

    def answers(self, rank: int, *, blocked: bool, entered: Sequence[int] = ()) -> None:
        question = max((m["question"] for _, m in self.sent if m["type"] == "ask"), default=0)
        answer = {
            "type": "answer", "question": question, "blocked": [1] if blocked else [], "where": "", "inside": "",
            "entered": [(other, 1) for other in entered],
        }  # fmt: skip
        self.says(rank, answer)

    def leaves(self, rank: int) -> None:
        self.says(rank, {"type": "left", "groups": {}})

    def dies(self, rank: int) -> None:
        self._keep(self.board.lost(rank + 10, "the connection ended", self.now))

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self._keep(self.board.tick(self.now))

    def told(self, kind: str) -> list[int]:
        return [peer - 10 for peer, message in self.sent if message["type"] == kind]

    def _keep(self, actions: Any) -> None:
        self.sent += [(each.peer, each.message) for each in actions if isinstance(each, Send)]


def test_ranks_that_wait_for_each_other_are_told() -> None:
    ranks = Ranks(2)
    ranks.waits(0, [1])
    ranks.waits(1, [0])
    ranks.passes(0.5)
    ranks.answers(0, blocked=True)
    ranks.answers(1, blocked=True)
    assert ranks.told("deadlock") == [0, 1]


def test_a_wait_for_a_rank_whose_script_has_ended_is_a_deadlock() -> None:
    ranks = Ranks(2)
    ranks.waits(0, [1])
    ranks.leaves(1)
    ranks.passes(0.5)
    ranks.answers(0, blocked=True)
    assert ranks.told("deadlock") == [0, 1]


_EVENTS = {
    "dies": lambda ranks: ranks.dies(2),
    "fails": lambda ranks: ranks.says(0, {"type": "failed"}),
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
    assert ranks.told("ask") == [0, 1, 2]
    if order.index("fails") > min(order.index("answers 0"), order.index("answers 1")):
        ranks.answers(2, blocked=False)  # it had time to
    for event in order:
        if event.startswith("answers") and order.index("fails") < order.index(event):
            continue  # a rank that has failed answers so
        _EVENTS[event](ranks)
    ranks.passes(6.0)
    assert not ranks.told("deadlock")


def test_a_rank_that_asks_who_has_ended_gets_the_answer_when_it_is_known() -> None:
    ranks = Ranks(4)
    ranks.says(0, {"type": "lost?", "ranks": [2, 3]})
    assert not ranks.told("ended")
    ranks.dies(3)
    assert not ranks.told("ended")
    ranks.leaves(2)
    assert ranks.sent == [(10, {"type": "ended", "ranks": [2]})]


def test_a_rank_that_asks_for_one_that_neither_ended_nor_died_is_answered_soon() -> None:
    ranks = Ranks(3)
    ranks.says(0, {"type": "lost?", "ranks": [2]})
    ranks.passes(0.5)
    assert ranks.sent == [(10, {"type": "ended", "ranks": []})]


def test_what_rank_0_leaves_behind_goes_to_all_others() -> None:
    ranks = Ranks(3)
    ranks.leaves(0)
    assert ranks.told("left") == [1, 2]
