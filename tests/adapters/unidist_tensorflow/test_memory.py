"""Tensors as arrays and buffers, and back."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.memory import (
    DTYPES,
    NUMPY_DTYPES,
    address_of,
    array_of,
    array_of_buffer,
    buffer_of,
    empty_array,
    tensor_of_array,
)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (500,)])
def test_every_dtype_there_and_back_without_a_copy(dtype: tf.DType, shape: tuple[int, ...]) -> None:
    tensor = tf.cast(tf.reshape(tf.range(int(np.prod(shape))) % 2, shape), dtype)
    array = array_of(tensor)
    assert array.shape == shape
    assert array.dtype == NUMPY_DTYPES[DTYPES[dtype]]
    made = empty_array(shape, array.dtype)
    np.copyto(made, array)
    back = tensor_of_array(made)
    assert back.dtype == dtype
    assert back.shape == shape
    np.testing.assert_array_equal(array_of(back), array)
    if array.size:
        assert address_of(array_of(tensor)) == address_of(array) or dtype == tf.bfloat16
        if shape:
            assert address_of(array_of(tensor)) == address_of(array)
            assert address_of(array_of(back)) == address_of(made)
    assert buffer_of(tensor).dtype is DTYPES[dtype]
    assert buffer_of(tensor).count == array.size


def test_a_tensor_keeps_the_memory_that_it_was_made_of() -> None:
    array = empty_array((1000,), np.dtype(np.float32))
    array[:] = 7
    tensor = tensor_of_array(array)
    del array
    gc.collect()
    others = [empty_array((1000,), np.dtype(np.float32)) for _ in range(50)]
    for other in others:
        other[:] = 9
    assert tf.reduce_all(tensor == 7)


def test_an_array_over_a_buffer_keeps_its_owner() -> None:
    buffer = Buffer.allocate(4, DType.FLOAT64)
    array = array_of_buffer(buffer, (2, 2))
    array[1, 1] = 3.0
    assert buffer.bytes().cast("d")[3] == 3.0
    del buffer
    gc.collect()
    assert array[1, 1] == 3.0


def test_what_has_no_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="string"):
        buffer_of(tf.constant("text"))
    with tf.Graph().as_default(), pytest.raises(UsageError, match="eager"):
        buffer_of(tf.compat.v1.placeholder(tf.float32))
    with pytest.raises(UsageError, match="cuda"):
        array_of_buffer(Buffer(0, 1, DType.INT8, None, "cuda:0"))


def test_the_framework_recognises_its_own() -> None:
    import keras

    framework = TensorFlowFramework()
    variable = keras.Variable([1.0, 2.0])
    assert all(framework.is_tensor(value) for value in (tf.constant(1), tf.Variable(1), variable))
    assert not framework.is_tensor(np.ones(2))
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    assert framework.is_model(model)
    assert framework.is_model(tf.Module())
    assert not framework.is_model(tf.Variable(1.0))
    assert len(framework.parameters(model)) == 4
    assert len(framework.model_state(model)) == 6
    assert set(framework.parameters(model)) <= set(framework.model_state(model))
    assert framework.dtype(variable) is DType.FLOAT32


def test_the_framework_computes_on_buffers() -> None:
    framework = TensorFlowFramework()
    source = framework.allocate(4, DType.FLOAT32, "host")
    array_of_buffer(source)[:] = [1, 2, 3, 4]
    target = framework.allocate(4, DType.BFLOAT16, "host")
    framework.convert(source, target)
    framework.multiply(target, 0.5)
    assert array_of_buffer(target).astype(float).tolist() == [0.5, 1.0, 1.5, 2.0]
    assert framework.tensor(target, (2, 2)).dtype == tf.bfloat16
    framework.zero(target)
    assert not array_of_buffer(target).astype(float).any()
    with pytest.raises(UsageError, match="cuda"):
        framework.allocate(1, DType.FLOAT32, "cuda:0")
