"""The binding of unidist's framework interface to TensorFlow."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unidist.algorithms import reduce_into
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.cost_model.figures import ParameterFigures
from unidist.cost_model.memory_interface import SizesModels
from unidist.cost_model.step_interface import CountsOperations
from unidist.errors import UsageError
from unidist.framework import Framework

if TYPE_CHECKING:
    import tensorflow as tf

    from unidist.cost_model.work import CountedPass


class TensorFlowFramework(Framework, SizesModels, CountsOperations):
    """See `unidist.framework.Framework`. tensorflow is imported when a tensor is first handled."""

    name = "tensorflow"

    def is_tensor(self, value: object) -> bool:
        """See `Framework.is_tensor`. Variables, TensorFlow's and Keras', count as tensors."""
        tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
        if tensorflow is None:
            return False
        return isinstance(value, tensorflow.Tensor | tensorflow.Variable) or (
            keras is not None and isinstance(value, keras.Variable)
        )

    def is_model(self, value: object) -> bool:
        """See `Framework.is_model`."""
        tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
        if keras is not None and isinstance(value, keras.Model):
            return True
        return tensorflow is not None and isinstance(value, tensorflow.Module) and not self.is_tensor(value)

    def buffer(self, tensor: tf.Tensor) -> Buffer:
        """See `Framework.buffer`. Tensors are immutable: the buffer may be read from only."""
        from unidist_tensorflow.memory import buffer_of

        return buffer_of(tensor)

    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> tf.Tensor:
        """See `Framework.tensor`. There is a copy where the memory is not at TensorFlow's alignment, of 64 bytes."""
        from unidist_tensorflow.memory import array_of_buffer, tensor_of_array

        return tensor_of_array(array_of_buffer(buffer, shape))

    def allocate(self, count: int, dtype: DType, memory: str) -> Buffer:
        """See `Framework.allocate`."""
        if memory != HOST:
            raise UsageError(f"TensorFlow gives no memory of kind {memory!r} that could be written to; choices: {HOST}")
        from unidist_tensorflow.memory import NUMPY_DTYPES, buffer_of_array, empty_array

        buffer = buffer_of_array(empty_array((count,), NUMPY_DTYPES[dtype]))
        self.zero(buffer)
        return buffer

    def zero(self, buffer: Buffer) -> None:
        """See `Framework.zero`."""
        ctypes.memset(buffer.address, 0, buffer.nbytes)

    def multiply(self, buffer: Buffer, factor: float) -> None:
        """See `Framework.multiply`."""
        from unidist_tensorflow.memory import array_of_buffer

        array = array_of_buffer(buffer)
        array *= array.dtype.type(factor)

    def add(self, source: Buffer, target: Buffer) -> None:
        """See `Framework.add`."""
        reduce_into(target, source, ReduceOp.SUM)

    def convert(self, source: Buffer, target: Buffer) -> None:
        """See `Framework.convert`."""
        from unidist_tensorflow.memory import array_of_buffer

        array_of_buffer(target)[:] = array_of_buffer(source)

    def norm(self, buffer: Buffer, order: float) -> float:
        """See `Framework.norm`."""
        from unidist_tensorflow.framework.arithmetic import norm

        return norm(buffer, order)

    def clamp(self, buffer: Buffer, limit: float) -> None:
        """See `Framework.clamp`."""
        from unidist_tensorflow.framework.arithmetic import clamp

        clamp(buffer, limit)

    def dtype(self, tensor: tf.Tensor) -> DType:
        """See `Framework.dtype`."""
        from unidist_tensorflow.memory import dtype_of

        return dtype_of(tensor)

    def parameters(self, model: Any) -> Mapping[str, Any]:
        """See `Framework.parameters`. Those that are not trainable belong to `model_state` only, as Keras sees it."""
        return _by_path(model.trainable_variables)

    def model_state(self, model: Any) -> Mapping[str, Any]:
        """See `Framework.model_state`."""
        return _by_path(model.variables)

    def without_memory(self) -> None:
        """See `SizesModels.without_memory`. TensorFlow's variables have memory as soon as there are any."""

    def parameter_figures(self, model: Any) -> Mapping[str, ParameterFigures]:
        """See `SizesModels.parameter_figures`. What is not trainable, statistics included, counts as frozen."""
        if getattr(model, "built", True) is False:
            raise UsageError("the model is not built yet: give it an Input, or call it once, then return it")
        trained = {id(variable) for variable in model.trainable_variables}
        return {
            path: ParameterFigures(math.prod(item.shape), self.dtype(item).itemsize, id(item) in trained)
            for path, item in _by_path(model.variables).items()
        }

    def activations(self, model: Any, inputs: Sequence[Any]) -> None:
        """See `SizesModels.activations`. TensorFlow does not show what its tape keeps."""

    def count(self, model: Any, inputs: Sequence[Any]) -> CountedPass:
        """See `CountsOperations.count`."""
        from unidist_tensorflow.framework.flop_count import count

        return count(model, inputs)


def _by_path(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by path, each once; a path that several of them have is numbered from its second use on."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for variable in variables:
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        path = base = str(getattr(variable, "path", variable.name))
        number = 1
        while path in found:
            path, number = f"{base}_{number}", number + 1
        found[path] = variable
    return found
