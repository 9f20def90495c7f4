"""TensorFlow behind the core's framework interface."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.cost_model.figures import ParameterFigures
from unidist.cost_model.memory_interface import SizesModels
from unidist.cost_model.step_interface import CountsOperations
from unidist.errors import UsageError
from unidist_arrays.host_framework import HostFramework

if TYPE_CHECKING:
    import tensorflow as tf

    from unidist.cost_model.work import CountedPass


class TensorFlowFramework(HostFramework, SizesModels, CountsOperations):
    """TensorFlow and Keras for the core. tensorflow is imported when a tensor is first handled."""

    name = "tensorflow"

    @override
    def is_tensor(self, value: object) -> bool:
        """Return whether it is a tensor; variables of TensorFlow and Keras count as such."""
        tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
        if tensorflow is None:
            return False
        return isinstance(value, tensorflow.Tensor | tensorflow.Variable) or (
            keras is not None and isinstance(value, keras.Variable)
        )

    @override
    def is_model(self, value: object) -> bool:
        tensorflow, keras = sys.modules.get("tensorflow"), sys.modules.get("keras")
        if keras is not None and isinstance(value, keras.Model):
            return True
        return tensorflow is not None and isinstance(value, tensorflow.Module) and not self.is_tensor(value)

    @override
    def buffer(self, tensor: Any) -> Buffer:
        import tensorflow as tf

        from unidist_tensorflow.memory import buffer_of

        if isinstance(tensor, tf.Tensor):
            return buffer_of(tensor)
        return buffer_of(tf.identity(tensor))

    @override
    def store(self, tensor: Any, buffer: Buffer) -> None:
        import tensorflow as tf

        if isinstance(tensor, tf.Tensor):
            raise UsageError("a tensor of TensorFlow does not change; give a variable")
        tensor.assign(self.tensor(buffer, tuple(tensor.shape)))

    @override
    def tensor(self, buffer: Buffer, shape: Sequence[int]) -> tf.Tensor:
        """Return a tensor over the memory, or a copy if that is not at TensorFlow's alignment of 64 bytes."""
        from unidist_tensorflow.memory import array_of_buffer, tensor_of_array

        return tensor_of_array(array_of_buffer(buffer, shape))

    @override
    def dtype(self, tensor: tf.Tensor) -> DType:
        from unidist_tensorflow.memory import dtype_of

        return dtype_of(tensor)

    @override
    def parameters(self, model: Any) -> Mapping[str, Any]:
        """Return the trainable variables; Keras counts the others as state only."""
        return _by_path(model.trainable_variables)

    @override
    def model_state(self, model: Any) -> Mapping[str, Any]:
        return _by_path(model.variables)

    @override
    def without_memory(self) -> None:
        """Return None: TensorFlow's variables have memory as soon as they are made."""

    @override
    def parameter_figures(self, model: Any) -> Mapping[str, ParameterFigures]:
        """Return sizes by path; variables that are not trainable, statistics included, count as frozen."""
        if getattr(model, "built", True) is False:
            raise UsageError("the model is not built yet: give it an Input, or call it once, then return it")
        trained = {id(variable) for variable in model.trainable_variables}
        return {
            path: ParameterFigures(math.prod(item.shape), self.dtype(item).itemsize, id(item) in trained)
            for path, item in _by_path(model.variables).items()
        }

    @override
    def activations(self, model: Any, inputs: Sequence[Any]) -> None:
        """Return None: TensorFlow does not show what its tape saves."""

    @override
    def count(self, model: Any, inputs: Sequence[Any]) -> CountedPass:
        from unidist_tensorflow.framework.flop_count import count

        return count(model, inputs)


def _by_path(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by path, each once; repeated paths are numbered from their second use on."""
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
