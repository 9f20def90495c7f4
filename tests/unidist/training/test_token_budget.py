"""Batches that fill a budget of tokens: each sample once, within the budget, and nearly full."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.errors import UsageError
from unidist.training.token_budget import TokenBudget

LENGTHS = st.lists(st.integers(0, 50), max_size=80)
SEEDS = st.none() | st.integers(0, 9)


def padded_tokens(batch: list[int], length: Callable[[int], float]) -> float:
    """Return the number of tokens of a batch with its padding."""
    return len(batch) * max(length(index) for index in batch)


def batches_of(budget: TokenBudget, lengths: list[int], seed: int | None = None) -> list[list[int]]:
    """Return the batches of all samples in their order."""
    return list(budget.batches(range(len(lengths)), lengths.__getitem__, seed=seed))


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(50, 300), st.none() | st.integers(1, 8), st.integers(1, 100), SEEDS)
def test_each_sample_is_in_one_batch_which_is_nearly_full(
    lengths: list[int], max_tokens: int, max_samples: int | None, window: int, seed: int | None
) -> None:
    made = batches_of(TokenBudget(max_tokens, max_samples, window), lengths, seed)
    assert sorted(itertools.chain(*made)) == list(range(len(lengths)))
    for batch in made:
        assert batch
        assert padded_tokens(batch, lengths.__getitem__) <= max_tokens
        assert max_samples is None or len(batch) <= max_samples
    for batch in made[:-1]:
        longest = max(lengths[index] for index in batch)
        is_full = padded_tokens(batch, lengths.__getitem__) > max_tokens - longest
        assert is_full or len(batch) == max_samples or longest == 0, "only the last batch of an epoch may have room"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(100, 300), SEEDS, st.integers(1, 4))
def test_ranks_have_about_as_much_to_do_in_each_step(
    lengths: list[int], max_tokens: int, seed: int | None, size: int
) -> None:
    made = batches_of(TokenBudget(max_tokens, None, 30), lengths, seed)[:-1]
    work = [padded_tokens(batch, lengths.__getitem__) for batch in made]
    for start in range(0, len(work) - size + 1, size):
        step = work[start : start + size]
        assert max(step) - min(step) < max(lengths)


def test_the_order_depends_on_the_seed_alone() -> None:
    chance = random.Random(0)
    lengths = [chance.randrange(1, 40) for _ in range(300)]
    budget = TokenBudget.of(lengths, max_tokens=200, window=150)
    assert batches_of(budget, lengths, 1) == batches_of(budget, lengths, 1) != batches_of(budget, lengths, 2)
    assert sorted(batches_of(budget, lengths, 1)) == sorted(batches_of(budget, lengths))
    first = [lengths[batch[0]] for batch in batches_of(budget, lengths)[:5]]
    assert first == sorted(first, reverse=True)


def test_sorted_samples_need_less_padding() -> None:
    chance = random.Random(1)
    lengths = [round(chance.lognormvariate(3, 0.8)) + 1 for _ in range(2000)]
    order = list(range(len(lengths)))
    plain = [order[start : start + 16] for start in range(0, len(order), 16)]

    def padding(batches: list[list[int]]) -> float:
        return 1 - sum(lengths) / sum(padded_tokens(batch, lengths.__getitem__) for batch in batches)

    budget = TokenBudget.of(lengths, max_tokens=16 * 30 * 2)
    assert 500 < budget.window < len(lengths)
    assert padding(batches_of(budget, lengths)) < 0.1 < 0.5 < padding(plain)


def test_a_sequence_without_end_is_read_window_by_window() -> None:
    made = TokenBudget(8, None, 4).batches(itertools.count(), lambda index: index % 2 + 1, seed=0)
    found = list(itertools.islice(made, 100))
    seen = list(itertools.chain(*found))
    assert len(seen) == len(set(seen))
    assert set(range(300)) <= set(seen)


def test_a_sample_that_is_drawn_twice_is_in_batches_twice() -> None:
    made = TokenBudget(4, None, 10).batches([3, 3, 1, 3], lambda index: 2, seed=None)
    assert list(made) == [[3, 3], [1, 3]]


def test_the_last_batch_can_be_left_out() -> None:
    made = TokenBudget(4, None, 10).batches(range(5), lambda index: 2, seed=None, drop_last=True)
    assert list(made) == [[0, 1], [2, 3]]


def test_a_sample_without_room_is_an_error() -> None:
    made = TokenBudget(4, None, 10).batches(range(3), [1, 2, 5].__getitem__, seed=None)
    with pytest.raises(UsageError, match="sample 2 has 5 tokens, and with max_tokens=4 no batch has room for it"):
        list(made)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 0}, "max_tokens=0: give a number above 0"),
        ({"max_tokens": float("nan")}, "max_tokens=nan"),
        ({"max_tokens": 9, "window": 0}, "window=0: give at least 1"),
        ({"max_tokens": 9, "lengths": [1, -1]}, "sample 1 is -1"),
        ({"max_tokens": 9, "lengths": [float("nan")]}, "sample 0 is nan"),
        ({"max_tokens": 9, "lengths": [float("inf")]}, "sample 0 is inf"),
    ],
)
def test_numbers_that_make_no_sense_are_errors(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TokenBudget.of(options.pop("lengths", [1.0]), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[], [0, 0], [1]])
def test_few_samples_have_a_window(lengths: list[int]) -> None:
    budget = TokenBudget.of(lengths, max_tokens=8)
    assert sorted(itertools.chain(*batches_of(budget, lengths))) == list(range(len(lengths)))
