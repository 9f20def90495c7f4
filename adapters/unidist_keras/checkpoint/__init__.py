"""Checkpoints of Keras models, optimizers and the seeds of layers, for every backend.

`names` has the paths of variables, `tensors` turns variables into pieces of a checkpoint and back, `optimizer` and
`states` are the states that a checkpoint consists of. An adapter derives from `KerasStates`. `trained` has the pieces
that ranks compare.
"""

from unidist_keras.checkpoint.names import stable_paths
from unidist_keras.checkpoint.optimizer import OptimizerState, plain_class, slot_of
from unidist_keras.checkpoint.states import KerasRandom, KerasStates, ModelState
from unidist_keras.checkpoint.tensors import dtype_of, piece_of, read_into, whole_weights
from unidist_keras.checkpoint.trained import trained_pieces

__all__ = [
    "KerasRandom", "KerasStates", "ModelState", "OptimizerState", "dtype_of", "piece_of", "plain_class", "read_into",
    "slot_of", "stable_paths", "trained_pieces", "whole_weights",
]  # fmt: skip
