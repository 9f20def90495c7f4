"""Adasum against its definition, over threads."""

from __future__ import annotations

import numpy as np
import pytest

from unidist.algorithms.adasum import adasum_allreduce
from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.testing.threads import ThreadWorld


def combined(vectors: list[np.ndarray]) -> np.ndarray:
    """Return what the paper defines: pairs, then pairs of pairs."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [(1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b for a, b in pairs]
    return vectors[0]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6), ("float16", 2e-3)])
def test_it_is_the_adaptive_sum_of_pairs(size: int, dtype: str, tolerance: float) -> None:
    vectors = [np.random.default_rng(rank).standard_normal(37).astype(dtype) for rank in range(size)]

    def main(communicator: Communicator) -> np.ndarray:
        source, target = vectors[communicator.rank].copy(), np.empty(37, dtype)
        adasum_allreduce(communicator, Buffer.of(source), Buffer.of(target), scale=0.5)
        np.testing.assert_array_equal(source, vectors[communicator.rank])
        return target

    with ThreadWorld(size) as world:
        results = world.run(main)
    expected = 0.5 * combined([vector.astype(np.float64) for vector in vectors])
    for result in results:
        np.testing.assert_array_equal(result, results[0])
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


def test_equal_vectors_give_their_mean_orthogonal_ones_their_sum_and_zeros_change_nothing() -> None:
    cases = [
        ([3.0, 4.0], [3.0, 4.0], [3.0, 4.0]),
        ([2.0, 0.0], [0.0, 5.0], [2.0, 5.0]),
        ([0.0, 0.0], [1.0, 2.0], [1.0, 2.0]),
    ]

    def main(communicator: Communicator) -> None:
        for case in cases:
            data = np.array(case[communicator.rank])
            adasum_allreduce(communicator, Buffer.of(data), Buffer.of(data))
            np.testing.assert_allclose(data, case[2], atol=1e-15)

    with ThreadWorld(2) as world:
        world.run(main)


def test_bfloat16_is_combined_in_wider_numbers() -> None:
    def main(communicator: Communicator) -> list[int]:
        values = np.full(3, 1.5 if communicator.rank else 3.0, np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        buffer = Buffer.of(bits).cast(DType.BFLOAT16)
        adasum_allreduce(communicator, buffer, buffer)
        return [int(each) for each in bits]

    with ThreadWorld(2) as world:
        results = world.run(main)
    a, b = np.full(3, 3.0), np.full(3, 1.5)
    expected = combined([a, b])[0]
    assert (np.array(results[0], np.uint32) << 16).view(np.float32)[0] == pytest.approx(expected, rel=1e-2)
    assert results[0] == results[1]


def test_three_ranks_and_whole_numbers_are_refused() -> None:
    def main(communicator: Communicator) -> None:
        buffer = Buffer.of(np.ones(2))
        with pytest.raises(UsageError, match="3 ranks are not a power of 2"):
            adasum_allreduce(communicator, buffer, buffer)

    with ThreadWorld(3) as world:
        world.run(main)

    def whole(communicator: Communicator) -> None:
        buffer = Buffer.of(np.ones(2, np.int32))
        with pytest.raises(UsageError, match="floating-point"):
            adasum_allreduce(communicator, buffer, buffer)

    with ThreadWorld(1) as world:
        world.run(whole)
