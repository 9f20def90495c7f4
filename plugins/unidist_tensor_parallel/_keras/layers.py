"""Layers of Keras that compute with a part of their variables: what `call` of a cut layer does.

A layer stays the object that it is; its class becomes a subclass of its own class, with the `call` of its role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from unidist.errors import UsageError
from unidist_tensor_parallel._keras.axis import TensorAxis


@dataclass(frozen=True)
class Share:
    """What a cut layer knows of its division.

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
    """What every cut layer has beside its own class."""

    _share: Share

    def save_own_variables(self, store: Any) -> None:
        """Refuse: Keras' files would get this rank's part of the variables as if it were the whole."""
        del store
        raise UsageError(
            f"the layer {getattr(self, 'path', self)!r} is cut over {self._share.axis.size} ranks, and Keras' files "
            "hold whole variables: save with unidist's save(path, model, optimizer), and turn that into a Keras file "
            "by `unidist checkpoint convert`"
        )


class Column(CutLayer):
    """Some of the outputs: the kernel's columns are cut, and the bias; what follows is element-wise, or is gathered."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """See `keras.layers.Dense`."""
        layer: Any = self
        outputs = ops.matmul(self._share.axis.enter(inputs), layer.kernel)
        if layer.bias is not None:
            outputs = ops.add(outputs, layer.bias)
        if self._share.gathers:
            outputs = self._share.axis.gather(outputs, self._share.counts)
        return outputs if layer.activation is None else layer.activation(outputs)

    def compute_output_shape(self, input_shape: Sequence[Any]) -> tuple[Any, ...]:
        """See `keras.layers.Dense`: what this rank computes."""
        units = sum(self._share.counts) if self._share.gathers else self._share.own
        return (*input_shape[:-1], units)


class Row(CutLayer):
    """Some of the inputs: the kernel's rows are cut; results are added up before the bias and the activation."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """See `keras.layers.Dense`."""
        layer: Any = self
        if self._share.splits:
            inputs = self._share.axis.take(inputs, self._share.counts)
        return _finished(layer, self._share.axis.leave(ops.matmul(inputs, layer.kernel)))


class EinsumRow(CutLayer):
    """An einsum over cut axes, as the projection after an attention: results are added up before the bias."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """See `keras.layers.EinsumDense`."""
        layer: Any = self
        return _finished(layer, self._share.axis.leave(ops.einsum(layer.equation, inputs, layer.kernel)))


class AttentionByHeads(CutLayer):
    """Some of the heads of a `MultiHeadAttention` or `GroupQueryAttention`; its projections are cut alike."""

    def call(self, query: Any, value: Any, key: Any = None, **options: Any) -> Any:
        """See `keras.layers.MultiHeadAttention`."""
        if options.get("return_attention_scores"):
            raise UsageError(
                f"return_attention_scores of {getattr(self, 'path', self)!r}: its heads are on "
                f"{self._share.axis.size} ranks. Leave it out, or give the layer the role 'replicate'"
            )
        entered: dict[int, Any] = {}
        for tensor in (query, value, key):
            if tensor is not None and id(tensor) not in entered:
                entered[id(tensor)] = self._enter(tensor)
        own = [None if tensor is None else entered[id(tensor)] for tensor in (query, value, key)]
        return super().call(*own, **options)  # type: ignore[misc]  # of the layer's own class

    def _enter(self, tensor: Any) -> Any:
        entered = self._share.axis.enter(tensor)
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            entered._keras_mask = mask
        return entered


class VocabularyEmbedding(CutLayer):
    """Some of the rows of an embedding: a rank looks up what it has, zeros are the rest, and results are added up."""

    def call(self, inputs: Any) -> Any:
        """See `keras.layers.Embedding`."""
        layer: Any = self
        begin = sum(self._share.counts[: self._share.axis.rank])
        local = tf.cast(inputs, tf.int64) - begin
        inside = (local >= 0) & (local < self._share.own)
        rows = ops.cast(ops.take(layer.embeddings, tf.where(inside, local, 0), axis=0), layer.compute_dtype)
        return self._share.axis.leave(tf.where(inside[..., None], rows, tf.zeros([], rows.dtype)))


def become(layer: Any, role: type[CutLayer], share: Share) -> None:
    """Let a layer compute by its share from now on."""
    plain = type(layer)
    layer.__class__ = type(plain.__name__, (role, plain), {"__doc__": plain.__doc__, "__module__": plain.__module__})
    layer._share = share


def cut_variable(variable: Any, part: Any) -> None:
    """Let a Keras variable hold a part of its values; it stays the object that layers and optimizers know."""
    with tf.init_scope():
        variable._shape = tuple(part.shape)
        variable._initialize(tf.constant(part, dtype=variable.value.dtype))


def _finished(layer: Any, outputs: Any) -> Any:
    """Return what a layer makes of its sums: bias and activation."""
    if layer.bias is not None:
        outputs = ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


DENSE, EINSUM, EMBEDDING = keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding
ATTENTIONS: tuple[type[Any], ...] = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
KINDS: tuple[type[Any], ...] = (DENSE, EMBEDDING, *ATTENTIONS)
"""What can be cut."""
