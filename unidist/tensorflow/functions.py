"""Operations on objects and variables, where Horovod has them: `unidist.tensorflow.functions`."""

from unidist_tensorflow.operations import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables

__all__ = [
    "allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
]  # fmt: skip
