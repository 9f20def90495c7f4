"""Samples of variable length for training on batches that fill a budget of tokens; numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

VOCABULARY, IGNORED = 11, -1
COUNT, MAX_TOKENS, WINDOW = 40, 48, 20
LENGTHS = [int(each) for each in np.random.default_rng(3).integers(2, 13, COUNT)]
ARGUMENTS: dict[str, Any] = {"cost": LENGTHS, "max_tokens": MAX_TOKENS, "window": WINDOW}

Sample = tuple[int, Any, Any]


def sample(index: int) -> Sample:
    """Return its number, tokens and targets, of which the first counts for nothing."""
    generator = np.random.default_rng((11, index))
    tokens, targets = (generator.integers(1, VOCABULARY, LENGTHS[index], dtype=np.int32) for _ in range(2))
    targets[0] = IGNORED
    return index, tokens, targets


def padded(samples: Sequence[Sample]) -> tuple[Any, Any]:
    """Return tokens and targets as a batch."""
    longest = max(len(tokens) for _, tokens, _ in samples)
    batch = np.zeros((len(samples), longest), np.int32), np.full((len(samples), longest), IGNORED, np.int32)
    for row, (_, tokens, targets) in enumerate(samples):
        batch[0][row, : len(tokens)] = tokens
        batch[1][row, : len(tokens)] = targets
    return batch


def numbers(tokens: Any) -> list[int]:
    """Return which samples the rows of a batch are."""
    rows = [tuple(row[row > 0].tolist()) for row in np.asarray(tokens)]
    return [_NUMBERS[row] for row in rows]


_NUMBERS = {tuple(sample(index)[1].tolist()): index for index in range(COUNT)}
assert len(_NUMBERS) == COUNT, "they are told apart by their tokens"


def together(everyone: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """Return the samples of all ranks in each step."""
    return [[index for rank in step for index in rank] for step in zip(*everyone, strict=True)]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return it."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
