"""`tf.linalg.global_norm` and `tf.clip_by_global_norm` of the gradients of a cut model: the norm of the whole model.

TensorFlow has no hook for calls with plain tensors, so its function is replaced while models are cut.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_tensor_parallel._keras.layers.axis import TensorAxis

_NAME = "global_norm"


class GlobalNorms:
    """The global norms of one runtime. They are replaced from the first cut model on until `shutdown`.

    Args:
        runtime: that owns this.
    """

    def __init__(self, runtime: RuntimeAPI) -> None:
        del runtime
        self._models: list[tuple[weakref.ref[Any], TensorAxis, frozenset[int]]] = []
        self._plain = tf.linalg.global_norm
        # Where clip_by_global_norm, by whichever name the script has it, looks the norm up.
        self._places = [tf.linalg, sys.modules[inspect.unwrap(tf.clip_by_global_norm).__module__]]
        for place in self._places:
            setattr(place, _NAME, tf.autograph.experimental.do_not_convert(self._global_norm))

    def add(self, model: Any, axis: TensorAxis, cut: Collection[int]) -> None:
        """Return the whole norm for the gradients of one more model.

        Args:
            model: cut.
            axis: the ranks that have its parts.
            cut: identities of its cut variables.
        """
        self._models.append((weakref.ref(model), axis, frozenset(cut)))

    def close(self) -> None:
        """Put TensorFlow's function back."""
        for place in self._places:
            setattr(place, _NAME, self._plain)

    def _global_norm(self, t_list: Any, name: str | None = None) -> Any:
        """Return `tf.linalg.global_norm`; for the gradients of a cut model that of the whole one, collective then.

        Raises:
            UsageError: some of the tensors may be gradients of cut variables, and which ones cannot be told.
        """
        tensors = list(t_list) if isinstance(t_list, list | tuple) else []
        part_shapes: set[tuple[int, ...]] = set()
        for reference, axis, cut in self._models:
            model = reference()
            if model is None:
                continue
            variables = model.trainable_variables
            if _fits(tensors, variables):
                is_cut = [id(variable) in cut for variable in variables]
                return _whole_norm(tensors, is_cut, axis, name)
            part_shapes.update(tuple(variable.shape) for variable in variables if id(variable) in cut)
        if any(tensor is not None and _static_shape(tensor) in part_shapes for tensor in tensors):
            raise UsageError(
                "global_norm: some of these tensors have the shape of a variable that is cut over the ranks (tensor=N),"
                " so each rank would get another norm. Give the gradients of all model.trainable_variables, in this "
                "order, or leave the clipping to --strategy clip_norm=1"
            )
        return self._plain(t_list, name)


def _fits(tensors: Sequence[Any], variables: Sequence[Any]) -> bool:
    """Return whether tensors can be the gradients of variables, in their order."""
    return len(tensors) == len(variables) > 0 and all(
        tensor is None or tf.TensorShape(tensor.shape).is_compatible_with(tuple(variable.shape))
        for tensor, variable in zip(tensors, variables, strict=True)
    )


def _static_shape(tensor: Any) -> tuple[int, ...] | None:
    shape = tf.TensorShape(getattr(tensor, "shape", None))
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def _whole_norm(tensors: Sequence[Any], is_cut: Sequence[bool], axis: TensorAxis, name: str | None) -> Any:
    """Return the norm of all tensors, with the other ranks' parts of those that are cut. Collective over the axis."""
    squares = {True: tf.zeros([], tf.float64), False: tf.zeros([], tf.float64)}
    dtype: Any = None
    for tensor, cut in zip(tensors, is_cut, strict=True):
        if tensor is None:
            continue
        values = tf.convert_to_tensor(tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor)
        dtype = dtype or values.dtype
        wide = values if values.dtype == tf.float64 else tf.cast(values, tf.float32)
        squares[cut] += tf.cast(2 * tf.nn.l2_loss(wide), tf.float64)
    return tf.cast(tf.sqrt(axis.reduced(squares[True][tf.newaxis])[0] + squares[False]), dtype or tf.float32, name=name)
