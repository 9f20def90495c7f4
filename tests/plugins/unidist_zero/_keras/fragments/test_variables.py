"""What a rank holds of one variable."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from unidist_tensorflow.memory import address_of, array_of, dtype_of  # noqa: E402 - after TensorFlow is known to be there
from unidist_zero._keras.fragments.variables import make_fragment  # noqa: E402 - after TensorFlow is known to be there
from unidist_zero.sharding.partition import Piece  # noqa: E402 - after TensorFlow is known to be there


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_fragment_does_not_keep_the_memory_of_the_whole(dtype: str) -> None:
    variable = keras.Variable(np.arange(4096).reshape(64, 64) % 200, dtype=dtype)
    piece = Piece(parameter=0, start=1024, count=64, bucket=0, offset=1024, owner=1)
    fragment = make_fragment(variable, piece, dtype_of(variable), whole=False)
    np.testing.assert_array_equal(fragment.storage.numpy(), variable.numpy().reshape(-1)[1024:1088])
    whole = array_of(variable.value.read_value())
    own = array_of(fragment.storage.value.read_value())
    assert not address_of(whole) <= address_of(own) < address_of(whole) + whole.nbytes


@pytest.mark.parametrize("whole", [False, True])
def test_a_graph_sees_a_fragment_that_has_moved_through_its_window(whole: bool) -> None:
    variable = keras.Variable(np.arange(6.0).reshape(2, 3), dtype="float32")
    pieces = [Piece(parameter=0, start=0, count=6 if whole else 4, bucket=0, offset=0, owner=0)]
    pieces.append(Piece(parameter=0, start=4, count=2, bucket=0, offset=4, owner=1))
    fragment = make_fragment(variable, pieces[0], dtype_of(variable), whole=whole)
    fragment.open_window()
    doubled = tf.function(lambda: tf.convert_to_tensor(fragment.source) * 2.0)
    expected = np.arange(6.0).reshape(2, 3) if whole else np.arange(4.0)
    np.testing.assert_array_equal(doubled().numpy(), 2.0 * expected)
    fragment.move(None if whole else pieces[1], whole=whole)
    fragment.storage.assign(np.zeros(0) if whole else [4.0, 5.0])
    fragment.show()
    np.testing.assert_array_equal(doubled().numpy(), [] if whole else [8.0, 10.0])
    seen = array_of(fragment.window.read_value())
    assert whole or address_of(seen) == address_of(array_of(fragment.storage.value.read_value()))  # one memory for both
