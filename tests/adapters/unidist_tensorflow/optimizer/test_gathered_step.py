"""Whole values and gradients of cut variables come from all ranks, whatever form of a gradient each of them has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

from unidist.checkpoint.format.pieces import Placement
from unidist.errors import ConfigurationError, UsageError
from unidist.testing import ThreadWorld
from unidist_tensorflow.optimizer.gathered_step import CutVariable, GatheredStep, _Axis

WHOLE = np.arange(20.0).reshape(5, 4)
ROWS = ([0, 1, 2], [3, 4])


def gathered(gradients: list[Any], dim: int = 0) -> list[Any]:
    """Return what each of two ranks gathers, in threads; a gradient for each."""

    def run(communicator: Any) -> Any:
        own = ROWS[communicator.rank]
        box = tuple((own[0], own[-1] + 1) if each == dim else (0, size) for each, size in enumerate(shape))
        variable = keras.Variable(np.take(whole, own, axis=dim), dtype="float64", name="matrix")
        cut = [CutVariable(variable, Placement("matrix", shape, box), "tensor")]
        update = SimpleNamespace(context=SimpleNamespace(new_communicator=lambda _: communicator))
        return _Axis(update, "tensor", cut).gather(cut, [gradients[communicator.rank]], [])[0]  # type: ignore[arg-type]

    whole = WHOLE if dim == 0 else WHOLE.T
    shape = whole.shape
    with ThreadWorld(2) as world:
        return world.run(run)


def slices(rows: list[int]) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(WHOLE[rows]), tf.constant(rows), tf.constant((3, 4)))


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_become_the_whole_along_the_dim_that_is_cut(dim: int) -> None:
    whole = WHOLE if dim == 0 else WHOLE.T
    for value, gradient in gathered([tf.constant(np.take(whole, own, axis=dim) + 1) for own in ROWS], dim):
        np.testing.assert_array_equal(value, whole)
        np.testing.assert_array_equal(gradient, whole + 1)


def test_a_gradient_that_one_rank_lacks_is_zero_there_and_none_if_all_lack_it() -> None:
    for _, gradient in gathered([None, tf.ones((2, 4), tf.float64)]):
        np.testing.assert_array_equal(gradient, [[0.0] * 4] * 3 + [[1.0] * 4] * 2)
    for value, gradient in gathered([None, None]):
        np.testing.assert_array_equal(value, WHOLE)
        assert gradient is None


def test_rows_of_sparse_gradients_stay_apart_and_get_their_places_in_the_whole() -> None:
    for _, gradient in gathered([slices([2, 0, 2]), slices([1])]):
        assert isinstance(gradient, tf.IndexedSlices)
        assert gradient.indices.numpy().tolist() == [2, 0, 2, 4]
        np.testing.assert_array_equal(gradient.values, WHOLE[[2, 0, 2, 1]])
    for _, gradient in gathered([slices([1]), None]):
        assert gradient.indices.numpy().tolist() == [1]


def test_a_gradient_that_is_sparse_on_some_ranks_only_is_an_error_on_all() -> None:
    with pytest.raises(UsageError, match="'matrix' is sparse on some ranks that it is cut over, and dense on others"):
        gathered([slices([1]), tf.ones((2, 4), tf.float64)])


def test_an_elastic_job_is_refused() -> None:
    variable = keras.Variable(WHOLE[:3], name="matrix")
    cut = CutVariable(variable, Placement("matrix", (5, 4), ((0, 3), (0, 4))), "tensor")
    update: Any = SimpleNamespace(context=SimpleNamespace(is_elastic=True), options=SimpleNamespace(precision=None))
    with pytest.raises(ConfigurationError, match=r"Muon looks at whole tensors, and 'matrix' is cut .* elastic job"):
        GatheredStep(None, keras.optimizers.Muon, update, [cut])
