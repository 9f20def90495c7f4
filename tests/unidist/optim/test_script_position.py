"""Ranks whose scripts have left a step or a batch out are told so, all of them, in the exchange of that update."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from unidist.buffer import Buffer
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import MismatchError
from unidist.optim.script_position import DrawnBatches, ScriptPosition, notice_of
from unidist.testing import ThreadWorld


class Rank:
    """The script of one rank."""

    def __init__(self, communicator: Communicator, *, is_elastic: bool = False) -> None:
        self.batches = DrawnBatches(Any)
        runtime: Any = SimpleNamespace(is_elastic=is_elastic, owned=lambda kind: self.batches)
        self.communicator = communicator
        self.position = ScriptPosition(runtime)
        self.position.compare(communicator)
        self.update = 0

    def exchange(self, *, passes: int = 1, is_joined: bool = False) -> None:
        """Do what an update does at its exchange."""
        place = None if is_joined else self.position.place(self.update + 1, passes)
        everyone = bytearray(notice_of(bytes(3), place))
        buffer = Buffer.of(everyone)
        self.communicator.allreduce(buffer, buffer, op=ReduceOp.MAX).wait()
        self.position.check(place, bytes(everyone))
        self.update += 1


def on_ranks(script: Callable[[Rank, int], Any], *, size: int = 3, is_elastic: bool = False) -> list[str]:
    """Run a script on ranks and return what each has raised, or ""."""

    def main(communicator: Communicator) -> str:
        try:
            script(Rank(communicator, is_elastic=is_elastic), communicator.rank)
        except MismatchError as exc:
            return str(exc)
        return ""

    with ThreadWorld(size) as world:
        return world.run(main)


def train(rank: Rank, *, batches: range, skips: Callable[[int], bool] = lambda batch: False) -> None:
    for batch in batches:
        rank.batches.drawn(batch)
        rank.position.reset()
        if skips(batch):
            continue
        rank.exchange()


def test_a_skipped_batch_is_told_to_all_ranks_in_that_update() -> None:
    told = on_ranks(lambda rank, me: train(rank, batches=range(1, 9), skips=lambda batch: me == 1 and batch == 4))
    assert len(set(told)) == 1
    assert "rank 0: update 4, batch 4 (1 drawn since the last exchange), 1 zero_grad() since then, at test_" in told[0]
    assert "rank 1: update 4, batch 5 (2 drawn since the last exchange), 2 zero_grad() since then" in told[0]
    assert "ud.allreduce" in told[0]


def test_a_skip_shows_in_zero_grad_alone_and_in_batches_alone() -> None:
    def without_loader(rank: Rank, me: int) -> None:
        for step in range(8):
            rank.position.reset()
            if (me, step) != (2, 5):
                rank.exchange()

    def without_zero_grad(rank: Rank, me: int) -> None:
        for step in range(8):
            rank.batches.drawn(step + 1)
            if (me, step) != (2, 5):
                rank.exchange()

    assert all("update 6" in each for each in on_ranks(without_loader))
    assert all("batch 7 (2 drawn" in each for each in on_ranks(without_zero_grad))


def test_an_update_that_one_rank_has_lost_is_told() -> None:
    def script(rank: Rank, me: int) -> None:
        for step in range(8):
            rank.exchange()
            if (me, step) == (0, 3):
                rank.update -= 1

    assert all("rank 0: update 4, " in each and "rank 1: update 5, " in each for each in on_ranks(script))


def test_what_ranks_may_do_differently() -> None:
    def script(rank: Rank, me: int) -> None:
        if me == 0:
            rank.batches.drawn(1)  # a look at the data before training
            rank.position.reset()
        for _ in range(2):
            train(rank, batches=range(1, 4))
            if me == 1:
                rank.batches.drawn(1)  # a look at the data by one rank
        for step in range(6):  # a loader that begins again where it ends, which is sooner on some ranks
            rank.batches.drawn(step % (3 + me) + 1)
            rank.exchange()

    assert on_ranks(script) == ["", "", ""]


def test_ranks_may_make_an_update_of_different_numbers_of_batches() -> None:
    def script(rank: Rank, me: int) -> None:
        for step in range(4):
            for part in range(me + 1):
                rank.batches.drawn(step * (me + 1) + part + 1)
            rank.exchange(passes=me + 1)

    assert on_ranks(script) == ["", "", ""]


def test_ranks_that_have_joined_are_not_compared_and_are_told() -> None:
    def script(rank: Rank, me: int) -> None:
        for step in range(6):
            if me == 2 and step > 2:
                rank.exchange(is_joined=True)
                continue
            if me == 1 and step == 4:
                rank.position.reset()
            rank.position.reset()
            rank.exchange()

    told = on_ranks(script)
    assert len(set(told)) == 1
    assert "rank 1: update 5, 2 zero_grad() before it" in told[0]
    assert "rank 2" not in told[0]


def test_an_elastic_job_may_skip() -> None:
    def script(rank: Rank, me: int) -> None:
        train(rank, batches=range(1, 8 + (me == 1)), skips=lambda batch: me == 1 and batch == 4)

    assert on_ranks(script, is_elastic=True) == ["", "", ""]


def test_other_learning_rates_are_told_to_all_ranks_before_the_update() -> None:
    def script(rank: Rank, number: int) -> None:
        rate = 0.1
        rank.position.rates = lambda: (rate, 1.0)
        for step in range(4):
            rank.position.reset()
            if step == 2 and number == 1:
                rate /= 2  # its own loss has not become better
            rank.exchange()

    [text] = set(on_ranks(script))
    assert "different learning rates (rank 0: 0.1, 1.0; rank 1: 0.05, 1.0; rank 2: 0.1, 1.0)" in text
