"""Checkpoints of Keras models, optimizers and random generators, and their conversion to Keras' own files.

What does not depend on TensorFlow is in `unidist_keras.checkpoint`. May import `framework` and the modules at the root
of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tensorflow.checkpoint.api import load, redistribute, save
    from unidist_tensorflow.checkpoint.states import KerasStates

__all__ = ["KerasStates", "load", "redistribute", "save"]

__getattr__ = lazy_names(
    __name__,
    {
        "api": "load redistribute save",
        "states": "KerasStates",
    },
)
