"""Pieces of gradients: noise that does not depend on who draws it, and what numpy cannot show."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.errors import PluginError, UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.pieces import GradientPiece

COUNT = 40_000  # several blocks


def piece(start: int, count: int, name: str = "weight", dtype: DType = DType.FLOAT32) -> GradientPiece:
    return GradientPiece(0, ParameterInfo(name, (COUNT,), dtype), start, Buffer.allocate(count, dtype))


def test_noise_is_the_same_however_a_parameter_is_divided() -> None:
    whole = piece(0, COUNT).normal(3, 1)
    assert abs(whole.mean()) < 0.02
    assert abs(whole.std() - 1) < 0.02
    for borders in ((0, 1, COUNT), (0, 16_384, 16_385, 32_768, COUNT), (0, 0, 39_999, COUNT)):
        parts = [piece(start, stop - start).normal(3, 1) for start, stop in itertools.pairwise(borders)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_noise_differs_by_parameter_seed_and_update() -> None:
    first = piece(0, 8).normal(3, 1)
    for other in (piece(0, 8, "bias").normal(3, 1), piece(0, 8).normal(4, 1), piece(0, 8).normal(3, 2)):
        assert not np.intersect1d(first, other).size


def test_noise_for_a_part_whose_place_is_not_known_is_refused() -> None:
    cut = GradientPiece(
        0, ParameterInfo("w", (2,), DType.FLOAT32, cut_axis="tensor"), 0, Buffer.allocate(2, DType.FLOAT32)
    )
    with pytest.raises(UsageError, match="'w', which is cut along the axis 'tensor'"):
        cut.normal(0)


def test_arrays_are_views_and_bfloat16_has_none() -> None:
    found = piece(5, 3)
    found.array()[1] = 2.0
    assert found.array().tolist() == [0.0, 2.0, 0.0]
    assert piece(0, 0).array().size == 0
    with pytest.raises(UsageError, match="bfloat16"):
        piece(0, 3, dtype=DType.BFLOAT16).array()


def test_an_exchange_that_divides_gradients_must_say_how() -> None:
    from fake_exchange import FakeExchange

    from unidist.gradients.interface import ReducedGradients
    from unidist.testing import ThreadWorld

    class Divided(FakeExchange):
        def reduced(self) -> ReducedGradients:
            return ReducedGradients((), world.run(lambda communicator: communicator)[0])

    with ThreadWorld(2) as world, pytest.raises(PluginError, match="Divided leaves each rank a part"):
        Divided([ParameterInfo("a", (2,), DType.FLOAT32)]).pieces()
