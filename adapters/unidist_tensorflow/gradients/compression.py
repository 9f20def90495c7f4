"""The argument `compression=`: a name, a compressor of unidist, or one of single tensors in Horovod's style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.builtin.half import BFloat16, Float16
from unidist.gradients import CompressorSpec
from unidist.gradients.compression import GradientCompressor
from unidist.gradients.per_tensor import PerTensor, TensorAccess
from unidist.horovod_api.arguments import bucket_compressor
from unidist.registry import Registry
from unidist_tensorflow.memory import (
    Array,
    array_of,
    array_of_buffer,
    buffer_of_array,
    dtype_of,
    empty_array,
    tensor_of_array,
)
from unidist_tensorflow.operations.compression import BF16Compressor, FP16Compressor, NoneCompressor

_OWN: dict[Any, GradientCompressor | None] = {
    NoneCompressor: None,
    FP16Compressor: Float16(),
    BF16Compressor: BFloat16(),
}


def compressor_of(compression: Any, registry: Registry[CompressorSpec]) -> GradientCompressor | None:
    """Return the compressor; None for `Compression.none`, which leaves it to the strategy.

    Raises:
        ConfigurationError: an unknown name.
        ValueError: not a compressor.
    """
    return bucket_compressor(
        compression, registry, members=_OWN, otherwise=lambda given: PerTensor.of(given, EagerTensors())
    )


class EagerTensors(TensorAccess):
    """A compressor's two functions are given eager tensors, in graphs too: the exchange is a Python function there."""

    @override
    def view(self, memory: Buffer, shape: Sequence[int]) -> Array:
        return array_of_buffer(memory, shape)

    @override
    def compress(self, compressor: Any, gradient: Array) -> tuple[Array, Buffer, Any]:
        with tf.device("CPU:0"):
            compressed, ctx = compressor.compress(tf.constant(gradient))  # a copy: tensors do not change
            compressed = tf.convert_to_tensor(compressed)
        dtype_of(compressed)
        array = array_of(compressed)
        wire = empty_array(array.shape, array.dtype)
        wire[...] = array
        return wire, buffer_of_array(wire), ctx

    @override
    def decompress(self, compressor: Any, gradient: Array, reduced: Array, ctx: Any) -> None:
        with tf.device("CPU:0"):
            result = tf.convert_to_tensor(compressor.decompress(tensor_of_array(reduced), ctx))
        gradient[...] = array_of(result).reshape(gradient.shape)
