"""Attentions of Keras whose queries are some tokens: keys and values are gathered after their projection.

A query's place in the sequence decides what it sees under a causal mask, and whole masks are cut to its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from unidist_context_parallel._keras.axis import KerasAxis

_tokens: ContextVar[int | None] = ContextVar("tokens of the sequence that layers get some of", default=None)


@contextmanager
def divided(tokens: int) -> Iterator[None]:
    """Within the block, layers get some of so many tokens."""
    before = _tokens.set(tokens)
    try:
        yield
    finally:
        _tokens.reset(before)


class DividedAttention:
    """Methods added to the class of an attention. Never instantiated; see `divide_attention`."""

    unidist_axis: KerasAxis

    def _compute_attention(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = _tokens.get()
        if tokens is not None:
            key, value = (self.unidist_axis.gather(each, tokens) for each in (key, value))
        return super()._compute_attention(query, key, value, *args, **kwargs)  # type: ignore[misc]  # of a layer

    def _compute_attention_mask(
        self,
        query: Any,
        value: Any,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
    ) -> Any:
        tokens = _tokens.get()
        axis = self.unidist_axis
        if tokens is None:
            return super()._compute_attention_mask(  # type: ignore[misc]  # of a layer
                query, value, query_mask, value_mask, key_mask, attention_mask, use_causal_mask
            )
        terms = []
        if query_mask is not None:
            terms.append(tf.cast(query_mask, tf.bool)[:, :, None])
        for mask in (value_mask, key_mask):
            if mask is not None:
                terms.append(axis.gather(tf.cast(mask, tf.bool), tokens)[:, None, :])
        if use_causal_mask:
            places = tf.constant(axis.layout(tokens).positions(axis.rank))
            terms.append(tf.range(tokens, dtype=places.dtype)[None, None, :] <= places[None, :, None])
        if attention_mask is not None:
            whole = tf.cast(attention_mask, tf.bool)
            rows = whole.shape[-2] == tokens and tokens > 1
            terms.append(axis.take(whole, tokens, dim=whole.shape.rank - 2) if rows else whole)
        if not terms:
            return None
        result = terms[0]
        for term in terms[1:]:
            result = tf.logical_and(result, term)
        return result


def divide_attention(layer: Any, axis: KerasAxis) -> None:
    """Let an attention reach the keys of all ranks when it is called with some tokens."""
    plain = type(layer)
    if not issubclass(plain, DividedAttention):
        kind: Any = type(plain.__name__, (DividedAttention, plain), {"__doc__": plain.__doc__})
        kind.__module__ = plain.__module__
        layer.__class__ = kind
    layer.unidist_axis = axis


ATTENTIONS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
