"""Applies one push, or the mean of several, to the contents of one shard. No locks, no journal: memory alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unidist_parameter_server.optimizers import FlatStep, Rule, apply_native
from unidist_parameter_server.store.memory import ShardContents
from unidist_parameter_server.store.shards import StoreShard

Array = np.ndarray[Any, np.dtype[Any]]


def apply_change(
    shard: StoreShard,
    before: ShardContents,
    after: ShardContents,
    change: Array,
    rules: Sequence[Rule],
    present: Sequence[bool],
    factor: float,
    scratch: tuple[Array, Array],
) -> None:
    """Write the values, slots and counts of a shard after a change. Whose push it was, `numbers`, is the caller's.

    Args:
        shard: whose contents.
        before: its contents before.
        after: those after it: the same object as `before`, or memory that does not overlap with it.
        change: a gradient or a difference, `(shard.count,)`; not changed.
        rules: for each parameter.
        present: for each parameter, whether it has a gradient; the others stay as they are.
        factor: of the learning rate, or of the difference.
        scratch: two arrays of the shard's type with `shard.count` elements or more.
    """
    if after is not before:
        after.counts[:] = before.counts
    for begin, end in _spans(shard, before.counts.tolist(), rules, present):
        pieces = shard.pieces
        parameter = pieces[begin].parameter
        span = slice(pieces[begin].start, pieces[end - 1].stop)
        if present[parameter]:
            length = span.stop - span.start
            values, slots = before.values[span], [slot[span] for slot in before.slots]
            step = FlatStep(
                values,
                values if after is before else after.values[span],
                change[span],
                slots,
                slots if after is before else [slot[span] for slot in after.slots],
                int(before.counts[begin]) + 1,
                factor,
                (scratch[0][:length], scratch[1][:length]),
            )
            if not apply_native(rules[parameter], step):
                rules[parameter].apply(step)
            after.counts[begin:end] += 1
        elif after is not before:
            after.values[span] = before.values[span]
            for slot, new_slot in zip(before.slots, after.slots, strict=True):
                new_slot[span] = slot[span]


def _spans(
    shard: StoreShard, counts: Sequence[int], rules: Sequence[Rule], present: Sequence[bool]
) -> Iterator[tuple[int, int]]:
    """Yield first and end of neighbouring pieces with the same change, including the gaps between them."""
    pieces = shard.pieces
    begin = 0
    while begin < len(pieces):
        first = pieces[begin].parameter
        end = begin + 1
        while (
            end < len(pieces)
            and present[pieces[end].parameter] == present[first]
            and rules[pieces[end].parameter] is rules[first]
            and counts[end] == counts[begin]
        ):
            end += 1
        yield begin, end
        begin = end
