"""Buffers that training changes are the same on all ranks after each exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unidist.communicator import Communicator, ReduceOp
from unidist.errors import ConfigurationError, MismatchError
from unidist.testing import ThreadWorld
from unidist_torch.models.model_buffers import BufferRule, ModelBuffers, check_buffer_rule


class Model(torch.nn.Module):
    """Statistics, a counter, a mask, a codebook, a cache that no checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2, dtype=torch.float64)
        self.register_buffer("codes", torch.zeros(3, 2))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("absent", None)


Change = Callable[[Model, int], Any]


def exchanged(*changes: Change, rule: BufferRule = "mean", size: int = 3, joined: int = -1) -> list[Model]:
    """Return the models of ranks that exchange after each change."""

    def main(communicator: Communicator) -> Model:
        model = Model()
        buffers = ModelBuffers(model, rule, lambda memory: communicator)
        for change in changes:
            change(model, communicator.rank)
            told = communicator.allocate(1)
            told.bytes()[0] = own = 0 if communicator.rank == joined else buffers.notice()
            communicator.allreduce(told, told, op=ReduceOp.MAX).wait()
            model.told = [*getattr(model, "told", ()), own]
            buffers.exchange(told.bytes()[0], root=int(joined == 0), is_joined=communicator.rank == joined)
        return model

    with ThreadWorld(size) as world:
        return world.run(main)


def train(model: Model, rank: int) -> None:
    """Do a forward pass over samples of this rank alone."""
    model.norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64) * (rank + 1))


def test_statistics_are_the_mean_of_the_ranks_and_counters_rank_0s() -> None:
    for model in exchanged(train):
        assert model.norm.running_mean.tolist() == pytest.approx([0.1 * 2 * 2, 0.1 * 3 * 2])
        assert model.norm.num_batches_tracked.item() == 1


def test_rank_0_gives_its_own() -> None:
    for model in exchanged(train, rule="rank0"):
        assert model.norm.running_mean.tolist() == pytest.approx([0.2, 0.3])


def test_what_does_not_change_is_not_exchanged() -> None:
    def nothing(model: Model, rank: int) -> None:
        model.eval()
        model.norm(torch.ones(2, 2, dtype=torch.float64))
        model.cache.fill_(rank)

    assert [model.told for model in exchanged(train, nothing)] == [[2, 0]] * 3
    assert [model.cache.item() for model in exchanged(nothing, train)] == [0, 1, 2]


def test_a_buffer_that_changes_later_and_on_one_rank_alone_is_exchanged_from_then_on() -> None:
    def one(model: Model, rank: int) -> None:
        train(model, rank)
        if rank == 1:
            model.codes[2] = 3.0

    def other(model: Model, rank: int) -> None:
        if rank == 2:
            model.codes = torch.full((3, 2), 9.0)  # another tensor

    for model in exchanged(train, one, other):
        assert model.codes.tolist() == [[3.0, 3.0], [3.0, 3.0], [pytest.approx((1 + 1 + 9) / 3)] * 2]


def test_a_rank_that_has_joined_has_no_part_in_a_mean_and_gets_it() -> None:
    def change(model: Model, rank: int) -> None:
        model.codes.fill_(float(rank))

    for model in exchanged(change, change, joined=2):
        assert model.codes[0, 0].item() == 0.5


def test_counters_are_those_of_the_first_rank_that_has_not_joined() -> None:
    def count(model: Model, rank: int) -> None:
        if rank:
            train(model, rank)

    for model in exchanged(count, count, joined=0):
        assert model.norm.num_batches_tracked.item() == 2


def test_buffers_of_other_shapes_are_an_error_on_all_ranks() -> None:
    def grow(model: Model, rank: int) -> None:
        model.codes = torch.zeros(3 + rank, 2)

    with pytest.raises(MismatchError, match=r"'codes'.*rank 1: \(\(4, 2\).*buffers='own'"):
        exchanged(grow)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mean"):
        check_buffer_rule("average")
