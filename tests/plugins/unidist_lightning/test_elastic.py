"""The samples that an epoch has left are divided over the ranks that there are, each once."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("lightning")

from torch.utils.data import DataLoader, DistributedSampler

from unidist_lightning.elastic import RemainingSampler


def sampler(size: int, num_replicas: int, rank: int, done: int, done_here: int) -> RemainingSampler:
    made = RemainingSampler(range(size), num_replicas, rank, seed=3)
    made.begin(2, done, done_here)
    made.set_epoch(2)
    return made


def test_three_ranks_take_what_two_have_left() -> None:
    before = []
    for rank in range(2):
        whole = DistributedSampler(range(60), 2, rank, seed=3)
        whole.set_epoch(2)
        before.append(list(whole)[:9])
    after = [list(sampler(60, 3, rank, done=18, done_here=9)) for rank in range(3)]
    assert [len(each) for each in after] == [14, 14, 14]
    assert sorted(itertools.chain(*before, *after)) == list(range(60))


def test_batches_are_numbered_on_as_in_a_whole_epoch() -> None:
    rest = sampler(60, 2, 1, done=18, done_here=9)
    assert len(rest) == 9 + 21
    assert len(DataLoader(range(60), 3, sampler=rest)) == 3 + 7


def test_samples_are_repeated_until_all_shares_are_equal() -> None:
    after = [list(sampler(10, 4, rank, done=4, done_here=2)) for rank in range(4)]
    assert [len(each) for each in after] == [2, 2, 2, 2]
    assert len(set(itertools.chain(*after))) == 6


@pytest.mark.parametrize("epoch", [1, 3])
def test_other_epochs_are_whole(epoch: int) -> None:
    each = sampler(60, 2, 0, done=18, done_here=9)
    each.set_epoch(epoch)
    plain = DistributedSampler(range(60), 2, 0, seed=3)
    plain.set_epoch(epoch)
    assert list(each) == list(plain)
    assert len(each) == 30
