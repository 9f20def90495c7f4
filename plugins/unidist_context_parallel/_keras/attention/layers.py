"""Attentions of Keras whose queries are some tokens: they reach the keys and values of all ranks.

A query's place in the sequence decides what it sees under a causal mask, and whole masks are cut to its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from unidist_context_parallel._keras.attention.axis import KerasAxis
from unidist_context_parallel._keras.attention.exchange import by_heads, by_ring
from unidist_context_parallel._keras.attention.masks import SequenceMask

ATTENTIONS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


@dataclass(frozen=True)
class Given:
    """The arguments of a layer's call.

    Args:
        tokens: of the whole sequence, of which they get some.
        whole_keys: an attention gets all keys and values nevertheless.
    """

    tokens: int
    whole_keys: bool = False


_given: ContextVar[Given | None] = ContextVar("the sequence that layers get some tokens of", default=None)


@contextmanager
def divided(tokens: int, *, whole_keys: bool = False) -> Iterator[None]:
    """Within the block, layers get some of so many tokens."""
    before = _given.set(Given(tokens, whole_keys))
    try:
        yield
    finally:
        _given.reset(before)


class DividedAttention:
    """Methods added to the class of an attention. Never instantiated; see `divide_attention`."""

    unidist_axis: KerasAxis
    unidist_exchange: str

    def _compute_attention(
        self, query: Any, key: Any, value: Any, attention_mask: Any = None, training: Any = None, *args: Any
    ) -> Any:
        given = _given.get()
        compute = super()._compute_attention  # type: ignore[misc]  # of a layer
        if given is None:
            return compute(query, key, value, attention_mask, training, *args)
        mask, axis = attention_mask, self.unidist_axis
        assert isinstance(mask, SequenceMask), "Keras asks for the mask before it attends"
        if given.whole_keys:
            return compute(query, key, value, mask.of_rows(key.shape[1]), training, *args)
        if self.unidist_exchange == "gather":
            key, value = (axis.gather(each, given.tokens) for each in (key, value))
            return compute(query, key, value, mask.of_rows(given.tokens), training, *args)
        if self.unidist_exchange == "ulysses":
            return by_heads(axis, compute, query, key, value, mask, training, *args), None
        groups = getattr(self, "num_repeats", 1)
        if groups > 1:  # Keras has repeated them; one of each goes around
            key, value = key[:, :, ::groups], value[:, :, ::groups]
        rate = self._dropout_layer.rate if training else 0.0  # type: ignore[attr-defined]  # of a layer
        seed = self._dropout_layer.seed_generator.next() if rate else None  # type: ignore[attr-defined]
        return by_ring(axis, query, key, value, mask, scale=self._unidist_scale, rate=rate, seed=seed), None

    @property
    def _unidist_scale(self) -> float:
        for name in ("_inverse_sqrt_key_dim", "_inverse_sqrt_head_dim"):
            if hasattr(self, name):
                return float(getattr(self, name))
        raise AssertionError("an attention of Keras has one of these")

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
        given = _given.get()
        if given is None:
            return super()._compute_attention_mask(  # type: ignore[misc]  # of a layer
                query, value, query_mask, value_mask, key_mask, attention_mask, use_causal_mask
            )
        return SequenceMask(
            self.unidist_axis,
            given.tokens,
            given.whole_keys,
            query_mask,
            [each for each in (value_mask, key_mask) if each is not None],
            use_causal_mask,
            sliding_window(self),
            None if attention_mask is None else tf.convert_to_tensor(attention_mask),
        )


def sliding_window(layer: Any) -> int | None:
    """Return the window of an attention, or None."""
    return getattr(layer, "_sliding_window", None) or getattr(layer, "sliding_window", None)


def num_heads(layer: Any) -> int:
    """Return the number of queries' heads of an attention."""
    return int(layer.num_query_heads if hasattr(layer, "num_query_heads") else layer.num_heads)


def divide_attention(layer: Any, axis: KerasAxis, exchange: str) -> None:
    """Let an attention reach the keys of all ranks when it is called with some tokens."""
    plain = type(layer)
    if not issubclass(plain, DividedAttention):
        kind: Any = type(plain.__name__, (DividedAttention, plain), {"__doc__": plain.__doc__})
        kind.__module__ = plain.__module__
        layer.__class__ = kind
    layer.unidist_axis, layer.unidist_exchange = axis, exchange
