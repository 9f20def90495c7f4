"""The plugin of the TensorFlow adapter: registers its framework. Imports no tensorflow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.framework import FrameworkSpec
from unidist.registry import Registry

if TYPE_CHECKING:
    from unidist.runtime.context import Context


@hookimpl
def unidist_initialized(context: Context) -> None:
    """Choose this rank's GPU, if the script trains with TensorFlow."""
    basics = sys.modules.get("unidist_tensorflow.basics")
    if basics is not None:
        basics.choose_device(context.topology)


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
            native=("unidist_tensorflow._nodes", "gradients of tf.function are exchanged when all of them are there"),
        )
    )
