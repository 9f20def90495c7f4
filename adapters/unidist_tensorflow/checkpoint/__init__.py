"""Checkpoints of Keras models, optimizers and random generators, and their conversion to Keras' own files.

May import `framework` and the modules at the root of this package.
"""

from unidist_tensorflow.checkpoint.api import load, save
from unidist_tensorflow.checkpoint.names import stable_paths
from unidist_tensorflow.checkpoint.optimizer import OptimizerState, plain_class, slot_of
from unidist_tensorflow.checkpoint.states import KerasStates, ModelState
from unidist_tensorflow.checkpoint.tensors import piece_of, read_into

__all__ = [
    "KerasStates", "ModelState", "OptimizerState", "load", "piece_of", "plain_class", "read_into", "save",
    "slot_of", "stable_paths",
]  # fmt: skip
