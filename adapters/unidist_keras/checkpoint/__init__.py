"""Checkpoints of Keras models, optimizers and the seeds of layers, for every backend.

`names` has the paths of variables, `tensors` turns variables into pieces of a checkpoint and back, `optimizer` and
`states` are the states that a checkpoint consists of. An adapter derives from `KerasStates`.
"""

from unidist_keras.checkpoint.names import stable_paths
from unidist_keras.checkpoint.optimizer import OptimizerState, plain_class, slot_of
from unidist_keras.checkpoint.states import KerasRandom, KerasStates, ModelState
from unidist_keras.checkpoint.tensors import dtype_of, piece_of, read_into

__all__ = [
    "KerasRandom", "KerasStates", "ModelState", "OptimizerState", "dtype_of", "piece_of", "plain_class", "read_into",
    "slot_of", "stable_paths",
]  # fmt: skip
