"""Models of Keras 3: dtype policies of their layers, and the loss scaled by the optimizer's `scale_loss`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import tensorflow as tf
from typing_extensions import override

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.precision import Precision, is_narrow
from unidist.optim.loss_scaling import LossScaler
from unidist_precision.binding import PrecisionBinding


class TensorFlowPrecision(PrecisionBinding):
    """See `PrecisionBinding`."""

    rounds_updates: ClassVar[bool] = True

    @override
    def prepare(self, model: Any, precision: Precision) -> Any:
        """See `PrecisionBinding.prepare`. Layers of the policy float32 get another one, whether they are built or not.

        Layers of other policies are left alone, and so are layers that the model makes while it is being built and that
        do not take over its policy. Batch normalisation keeps float32 variables.
        """
        layers = [layer for layer in model._flatten_layers() if layer.dtype_policy.name == "float32"]
        if not layers:
            found = ", ".join(sorted({layer.dtype_policy.name for layer in model._flatten_layers()}))
            raise UsageError(
                f"strategy 'precision' computes in 16 bits what is float32, but the model's layers have the policies: "
                f"{found}. Leave the strategy out, or make the model float32"
            )
        name = precision.compute.value
        for layer in layers:
            is_whole = is_narrow(precision.parameters) and not isinstance(layer, keras.layers.BatchNormalization)
            layer.dtype_policy = keras.DTypePolicy(name if is_whole else f"mixed_{name}")
            if is_whole:
                for variable in layer._trainable_variables:
                    _narrow(variable, precision.parameters)
        return model

    @override
    def attach(self, model: Any, compute: DType, scaler: LossScaler | None) -> Callable[[], str]:
        """See `PrecisionBinding.attach`. The scaler is the bound optimizer's, in place of Keras' own."""
        if scaler is not None:
            model.compile = functools.partial(model.compile, auto_scale_loss=False)

        def report() -> str:
            made = [layer for layer in model._flatten_layers() if layer.dtype_policy.name == "float32"]
            names = [layer.path or layer.name for layer in made if layer._trainable_variables]
            if not names:
                return ""
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return (
                f"the layers {', '.join(names[:3])}{more} were made after the model was distributed, and compute in "
                f"float32. Make them in __init__, or give them the model's policy: dtype=self.dtype_policy"
            )

        return report


def _narrow(variable: Any, dtype: DType) -> None:
    """Give a variable that is float32 a value, and memory, of another type; it stays the object it is."""
    if keras.backend.standardize_dtype(variable.dtype) == "float32":
        if variable._value is None:  # built without values: they are drawn as they would have been, later
            plain = variable._initializer
            variable._initializer = lambda shape, dtype: tf.cast(plain(shape, dtype="float32"), dtype)
            variable._dtype = dtype.value
            return
        value = tf.cast(variable.value, dtype.value)
        variable._dtype = dtype.value
        variable._initialize(value)
