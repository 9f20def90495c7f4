"""Batches of samples of about one length, that fill a budget of tokens instead of having a number of samples. Pure.

As fairseq's `--max-tokens` and Lhotse's bucketing sampler make them, but independent of the number of ranks: every rank
goes through the same sequence of batches, so any number of ranks can divide the rest of an epoch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from unidist.errors import UsageError

_BATCHES = 50
"""About so many batches are made of a window, unless its size is given; as in Hugging Face's `group_by_length`."""


@dataclass(frozen=True)
class TokenBudget:
    """How batches are made.

    Args:
        max_tokens: of a batch, with its padding: the number of its samples times the length of the longest one.
        max_samples: of a batch; None: any number.
        window: number of samples in the order of the epoch that are sorted by length together.
    """

    max_tokens: float
    max_samples: int | None
    window: int

    def __str__(self) -> str:
        limit = "" if self.max_samples is None else f" and {self.max_samples} samples"
        return f"batches of at most {self.max_tokens} tokens{limit}, made of {self.window} samples at a time"

    @classmethod
    def of(
        cls, lengths: Sequence[float], *, max_tokens: float, max_samples: int | None = None, window: int | None = None
    ) -> TokenBudget:
        """Return a budget; the default window has the samples of about 50 batches.

        Raises:
            UsageError: a number that makes no sense; a length that is negative or not finite.
        """
        if not (math.isfinite(max_tokens) and max_tokens > 0):
            raise UsageError(f"max_tokens={max_tokens}: give a number above 0")
        if window is not None and window < 1:
            raise UsageError(f"window={window}: give at least 1")
        wrong = next((index for index, each in enumerate(lengths) if not 0 <= each < math.inf), None)
        if wrong is not None:
            raise UsageError(
                f"cost= of sample {wrong} is {lengths[wrong]}; with max_tokens= costs are lengths, from 0 on"
            )
        if window is None:
            mean = sum(lengths) / max(len(lengths), 1)
            window = len(lengths) if mean == 0 else round(_BATCHES * max(1.0, max_tokens / mean))
            window = max(1, min(window, len(lengths)))
        return cls(max_tokens, max_samples, window)

    def check(self, index: int, length: float) -> None:
        """Raise UsageError if no batch has room for a sample."""
        if length > self.max_tokens:
            raise UsageError(
                f"sample {index} has {_number(length)} tokens, and with max_tokens={self.max_tokens} no batch has room "
                "for it. Cut such samples, leave them out, or give a larger max_tokens"
            )

    def batches(
        self, indices: Iterable[int], length: Callable[[int], float], *, seed: int | None, drop_last: bool = False
    ) -> Iterator[list[int]]:
        """Yield the batches of an epoch: each of the samples once.

        A window is sorted, and batches are filled from the longest sample on. So a batch has more than `max_tokens`
        less the length of its longest sample, unless it has `max_samples`. The last one of a window, which may have
        room, goes into the next window; so only the last one of the epoch may have less.

        Args:
            indices: in the order of the epoch; may have no end.
            length: of a sample.
            seed: of the order of the batches of a window; None: from the longest samples to the shortest.
            drop_last: leave out the last batch of the epoch.

        Raises:
            UsageError: a sample is longer than the budget.
        """
        rest = iter(indices)
        generator = None if seed is None else random.Random(seed)
        left: list[int] = []
        while window := list(islice(rest, self.window)):
            made = list(self._fill([*left, *window], length))
            left = made.pop()
            if generator is not None:
                generator.shuffle(made)
            yield from made
        if left and not drop_last:
            yield left

    def _fill(self, indices: Sequence[int], length: Callable[[int], float]) -> Iterator[list[int]]:
        """Yield batches of all samples of a window; the last one may have room for more."""
        lengths = {index: length(index) for index in indices}
        batch: list[int] = []
        longest = 0.0
        for index in sorted(indices, key=lambda each: -lengths[each]):  # equal ones stay in the order of the epoch
            if not batch:
                longest = lengths[index]
                self.check(index, longest)
            elif longest * (len(batch) + 1) > self.max_tokens or len(batch) == self.max_samples:
                yield batch
                batch, longest = [], lengths[index]
            batch.append(index)
        yield batch


def _number(length: float) -> str:
    return f"{length:g}" if length != int(length) else str(int(length))
