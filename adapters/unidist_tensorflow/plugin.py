"""The plugin of the TensorFlow adapter: registers its framework. Imports no tensorflow."""

from __future__ import annotations

from unidist import hookimpl
from unidist.framework import FrameworkSpec
from unidist.registry import Registry


@hookimpl
def unidist_register_frameworks(registry: Registry[FrameworkSpec]) -> None:
    """Register `tensorflow`."""
    registry.add(
        FrameworkSpec(
            "tensorflow",
            "unidist_tensorflow.framework:TensorFlowFramework",
            "tensorflow",
            "TensorFlow 2, and Keras 3 on top of it",
            conformance="unidist_tensorflow.training.conformance",
            exports=(
                (".weights.h5", "unidist_tensorflow.checkpoint.convert:to_keras_weights"),
                (".keras", "unidist_tensorflow.checkpoint.convert:to_keras_model"),
            ),
            keras="unidist_tensorflow.keras.facade",
        )
    )
