"""The check that ranks gather the same thing, without a framework."""

from __future__ import annotations

import pytest

from unidist.communicator import Communicator
from unidist.errors import MismatchError
from unidist.testing import ThreadWorld
from unidist_zero.sharding.gather_check import GatherCheck

NAMES = ("layers.0", "layers.1", "layers.2")


def test_equal_numbers_pass_and_others_name_the_part_of_each_rank() -> None:
    def on_rank(communicator: Communicator) -> str:
        checks = [GatherCheck(communicator, number, NAMES) for number in range(3)]
        for check in (*checks, *reversed(checks)):
            check.post()
            check.verify()
        wrong = checks[1 if communicator.rank == 2 else 0]
        wrong.post()
        with pytest.raises(MismatchError) as caught:
            wrong.verify()
        wrong.verify()  # there is nothing more to compare
        return str(caught.value)

    for message in ThreadWorld(3).run(on_rank):
        assert "rank 0 'layers.0', rank 1 'layers.0', rank 2 'layers.1'" in message


def test_a_check_that_is_left_for_later_is_made_before_the_next() -> None:
    def on_rank(communicator: Communicator) -> None:
        check = GatherCheck(communicator, communicator.rank, NAMES)
        check.post()
        with pytest.raises(MismatchError):
            check.post()

    ThreadWorld(2).run(on_rank)


def test_one_rank_asks_nobody() -> None:
    def on_rank(communicator: Communicator) -> None:
        check = GatherCheck(communicator, 0, NAMES)
        check.post()
        check.verify()

    ThreadWorld(1).run(on_rank)
