"""Classes of cut Keras layers, whose `call` computes with a part of the variables.

A layer stays the same object; its class becomes a subclass of the former one, with the `call` of its role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from unidist.errors import UsageError
from unidist.mixins import with_mixin
from unidist_tensor_parallel._keras.layers.axis import TensorAxis


@dataclass(frozen=True)
class CutSpec:
    """The division of a cut layer.

    Args:
        axis: the exchanges.
        counts: units of the cut dim on each rank.
        splits: a row layer: its input arrives whole.
        gathers: a column layer: its outputs are gathered.
    """

    axis: TensorAxis
    counts: tuple[int, ...]
    splits: bool = False
    gathers: bool = False

    @property
    def own(self) -> int:
        """Units of this rank."""
        return self.counts[self.axis.rank]


class CutLayer:
    """Added to the class of every cut layer."""

    _cut_spec: CutSpec

    def save_own_variables(self, store: Any) -> None:
        """Refuse: Keras' files would get this rank's part of the variables as if it were the whole."""
        del store
        raise UsageError(
            f"the layer {getattr(self, 'path', self)!r} is cut over {self._cut_spec.axis.size} ranks, and Keras' files "
            "hold whole variables: save with unidist's save(path, model, optimizer), and turn that into a Keras file "
            "by `unidist checkpoint convert`"
        )


class DenseColumn(CutLayer):
    """Computes some of the outputs: kernel and bias are cut by columns; what follows is element-wise, or gathered."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """See `keras.layers.Dense`."""
        layer: Any = self
        outputs = ops.matmul(self._cut_spec.axis.enter(inputs), layer.kernel)
        if layer.bias is not None:
            outputs = ops.add(outputs, layer.bias)
        if self._cut_spec.gathers:
            outputs = self._cut_spec.axis.gather(outputs, self._cut_spec.counts)
        return outputs if layer.activation is None else layer.activation(outputs)

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """See `keras.layers.Dense`: what this rank computes."""
        units = sum(self._cut_spec.counts) if self._cut_spec.gathers else self._cut_spec.own
        return (*input_shape[:-1], units)


class DenseRow(CutLayer):
    """Takes some of the inputs: the kernel is cut by rows; results are summed before the bias and the activation."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """See `keras.layers.Dense`."""
        layer: Any = self
        if self._cut_spec.splits:
            inputs = self._cut_spec.axis.split(inputs, self._cut_spec.counts)
        return _finished(layer, self._cut_spec.axis.leave(ops.matmul(inputs, layer.kernel)))


class EinsumRow(CutLayer):
    """An einsum over cut axes, as the projection after an attention: results are summed before the bias."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """See `keras.layers.EinsumDense`."""
        layer: Any = self
        return _finished(layer, self._cut_spec.axis.leave(ops.einsum(layer.equation, inputs, layer.kernel)))


class AttentionByHeads(CutLayer):
    """Some of the heads of a `MultiHeadAttention` or `GroupQueryAttention`; its projections are cut the same way."""

    def call(self, query: Any, value: Any, key: Any = None, **options: Any) -> Any:
        """See `keras.layers.MultiHeadAttention`."""
        if options.get("return_attention_scores"):
            raise UsageError(
                f"return_attention_scores of {getattr(self, 'path', self)!r}: its heads are on "
                f"{self._cut_spec.axis.size} ranks. Leave it out, or give the layer the role 'replicate'"
            )
        entered: dict[int, Any] = {}
        for tensor in (query, value, key):
            if tensor is not None and id(tensor) not in entered:
                entered[id(tensor)] = self._enter(tensor)
        own = [None if tensor is None else entered[id(tensor)] for tensor in (query, value, key)]
        return super().call(*own, **options)  # type: ignore[misc]  # of the layer's own class

    def _enter(self, tensor: Any) -> Any:
        entered = self._cut_spec.axis.enter(tensor)
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            entered._keras_mask = mask
        return entered


class VocabularyEmbedding(CutLayer):
    """Some of the rows of an embedding: a rank looks up its own rows, the others are zeros, and results are summed."""

    def call(self, inputs: Any) -> Any:
        """See `keras.layers.Embedding`."""
        layer: Any = self
        begin = sum(self._cut_spec.counts[: self._cut_spec.axis.rank])
        local = tf.cast(inputs, tf.int64) - begin
        inside = (local >= 0) & (local < self._cut_spec.own)
        rows = ops.cast(ops.take(layer.embeddings, tf.where(inside, local, 0), axis=0), layer.compute_dtype)
        return self._cut_spec.axis.leave(tf.where(inside[..., None], rows, tf.zeros([], rows.dtype)))


def become(layer: Any, role: type[CutLayer], spec: CutSpec) -> None:
    """Let a layer compute its part from now on."""
    plain = type(layer)
    layer.__class__ = with_mixin(plain, role)
    layer._cut_spec = spec


def cut_variable(variable: Any, part: Any) -> None:
    """Let a Keras variable hold a part of its values; it stays the object that layers and optimizers know."""
    with tf.init_scope():
        variable._shape = tuple(part.shape)
        variable._initialize(tf.constant(part, dtype=variable.value.dtype))


def _finished(layer: Any, outputs: Any) -> Any:
    """Apply a layer's bias and activation to the summed results."""
    if layer.bias is not None:
        outputs = ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


DENSE, EINSUM, EMBEDDING = keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding
ATTENTIONS: tuple[type[Any], ...] = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
KINDS: tuple[type[Any], ...] = (DENSE, EMBEDDING, *ATTENTIONS)
"""What can be cut."""
