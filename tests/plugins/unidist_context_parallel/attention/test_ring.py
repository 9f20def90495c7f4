"""The ring in numpy, with threads as ranks, gives output and gradients of attention to the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from unidist.communicator import Communicator
from unidist.testing.threads import ThreadWorld
from unidist_arrays.memory import buffer_of_array
from unidist_context_parallel.attention import ring
from unidist_context_parallel.attention.arrays import NumpyFunctions
from unidist_context_parallel.attention.blocks import BlockAttention, Mask
from unidist_context_parallel.layout.sequence import zigzag

Array = np.ndarray[Any, Any]

B, K, G, W, V = 2, 2, 3, 4, 5
_generator = np.random.default_rng(0)


def whole(q: Array, k: Array, v: Array, seen: Array, gradient: Array) -> list[Array]:
    """Return output and gradients, written out; a query that sees nothing has the mean of all values."""
    scores = np.where(seen, q @ k.swapaxes(-1, -2), -1e300)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = weights @ v
    of_weights = gradient @ v.swapaxes(-1, -2)
    of_scores = np.where(seen, weights * (of_weights - (gradient * output).sum(-1, keepdims=True)), 0.0)
    of_v = (weights.swapaxes(-1, -2) @ gradient).sum(2, keepdims=True)
    return [output, of_scores @ k, (of_scores.swapaxes(-1, -2) @ q).sum(2, keepdims=True), of_v]


def worst(tokens: int, ranks: int, *, shifts: bool = True, masks: str = "", tile: int = 3, **options: Any) -> float:
    """Return how far the ranks are from one process."""
    q, gradient = (_generator.normal(size=(B, K, G, tokens, width)) for width in (W, V))
    k, v = (_generator.normal(size=(B, K, 1, tokens, width)) for width in (W, V))
    places = np.arange(tokens)
    seen = np.ones((B, K, G, tokens, tokens), bool)
    if options.get("causal"):
        seen &= places[None, :] <= places[:, None]
    if options.get("window"):
        seen &= abs(places[None, :] - places[:, None]) < options["window"]
    lengths = np.array([tokens, max(1, tokens - 4)])
    padding = places >= tokens - lengths[:, None]  # in front, so that rows are blind under a causal mask
    queries = padding[:, None, None, :, None] if "q" in masks else None
    keys = padding[:, None, None, None, :] if "k" in masks else None
    pairs = _generator.random((B, 1, 1, tokens, tokens)) > 0.4 if "p" in masks else None
    for mask in (queries, keys, pairs):
        seen = seen & mask if mask is not None else seen
    expected = whole(q, k, v, seen, gradient)
    layout = zigzag(tokens, ranks)

    def run(communicator: Communicator) -> float:
        def shift(arrays: Sequence[Array], rows: int, after: Sequence[Array]) -> list[Array]:
            found = []
            for each in arrays:
                source = np.ascontiguousarray(each)
                target = np.zeros((*each.shape[:3], rows, each.shape[4]))
                if shifts:
                    works = [
                        communicator.send(buffer_of_array(source), to=(communicator.rank + 1) % ranks),
                        communicator.recv(buffer_of_array(target), source=(communicator.rank - 1) % ranks),
                    ]
                    for work in works:
                        work.wait()
                found.append(target)
            return found

        own = layout.positions(communicator.rank)
        mask = None
        if masks:
            mask = Mask(
                None if queries is None else queries[:, :, :, own],
                keys,
                None if pairs is None else pairs[:, :, :, own],
            )
        attention = BlockAttention(NumpyFunctions(), layout, communicator.rank, mask=mask, tile=tile, **options)
        given = [each[:, :, :, own] for each in (q, k, v)]
        output, sums = ring.attend(attention, shift, *given)
        found = ring.gradients(attention, shift, gradient[:, :, :, own], *given, output, sums)
        return max(
            float(np.abs(one - other[:, :, :, own]).max())
            for one, other in zip((output, *found), expected, strict=True)
        )

    with ThreadWorld(ranks) as world:
        return max(world.run(run))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [4, 13])
def test_output_and_gradients_are_those_of_the_whole_sequence(ranks: int, tokens: int) -> None:
    for options in ({}, {"causal": True}, {"window": 3}, {"causal": True, "window": 5}):
        for masks in ("", "q", "k", "p", "qkp"):
            assert worst(tokens, ranks, masks=masks, **options) < 1e-12


@pytest.mark.parametrize("tile", [1, 4, 1024])
def test_any_size_of_tiles(tile: int) -> None:
    assert worst(17, 2, causal=True, masks="k", tile=tile) < 1e-12


def test_a_block_that_does_not_arrive_is_missed() -> None:
    assert worst(13, 2, shifts=False) > 1e-3


def test_dropped_weights_are_the_same_in_the_backward_pass() -> None:
    layout, size = zigzag(7, 1), (B, K, G, 7, W)
    q, gradient = _generator.normal(size=size), _generator.normal(size=size)
    k, v = (_generator.normal(size=(B, K, 1, 7, W)) for _ in range(2))

    def dropped(weights: Array, number: int) -> Array:
        return (np.random.default_rng(number).random(weights.shape) > 0.4) / 0.6

    def stay(arrays: Sequence[Array], rows: int, after: Sequence[Array]) -> list[Array]:
        return list(arrays)

    def loss(q: Array, k: Array, v: Array, dropped: Any = dropped) -> tuple[float, list[Array]]:
        attention = BlockAttention(NumpyFunctions(), layout, 0, causal=True, dropped=dropped, tile=3)
        output, sums = ring.attend(attention, stay, q, k, v)
        return float((output * gradient).sum()), list(ring.gradients(attention, stay, gradient, q, k, v, output, sums))

    value, found = loss(q, k, v)
    assert abs(value - loss(q, k, v, None)[0]) > 1e-3
    for place, one in enumerate(found):
        given = [q, k, v]
        direction = _generator.normal(size=given[place].shape)
        ahead, behind = (
            [*given[:place], given[place] + step * direction, *given[place + 1 :]] for step in (1e-5, -1e-5)
        )
        slope = (loss(*ahead)[0] - loss(*behind)[0]) / 2e-5
        assert slope == pytest.approx(float((one * direction).sum()), rel=1e-6, abs=1e-6)
