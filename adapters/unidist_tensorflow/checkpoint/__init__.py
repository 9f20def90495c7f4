"""Checkpoints of Keras models, optimizers and random generators, and their conversion to Keras' own files.

What does not depend on TensorFlow is in `unidist_keras.checkpoint`. May import `framework` and the modules at the root
of this package.
"""

from unidist_tensorflow.checkpoint.api import load, redistribute, save
from unidist_tensorflow.checkpoint.states import KerasStates

__all__ = ["KerasStates", "load", "redistribute", "save"]
