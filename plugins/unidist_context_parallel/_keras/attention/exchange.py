"""Gives Keras' attention the keys and values of other ranks: by the ring, or by exchanging tokens for heads.

Keras' shapes are `(batch, tokens, heads, width)`, those of the ring `(batch, heads of keys, groups, tokens, width)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from unidist_context_parallel._keras.attention.axis import KerasAxis
from unidist_context_parallel._keras.attention.functions import TensorFlowFunctions
from unidist_context_parallel._keras.attention.masks import SequenceMask
from unidist_context_parallel.attention import ring
from unidist_context_parallel.attention.blocks import BlockAttention
from unidist_tensorflow.gradients import differentiable_once

_FUNCTIONS = TensorFlowFunctions()


def by_ring(
    axis: KerasAxis,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    mask: SequenceMask,
    *,
    scale: float,
    rate: float,
    seed: tf.Tensor | None,
) -> tf.Tensor:
    """Return the output of this rank's queries, `(batch, tokens, heads, width)`. Differentiable; collective.

    For the backward pass queries, keys, values and outputs of this rank are kept, and no weights.

    Args:
        axis: the ranks.
        query: of this rank's tokens.
        key: the same, with as many heads or a part of them.
        value: the same.
        mask: what hides keys.
        scale: of the scores.
        rate: of dropout.
        seed: of its numbers, `(2,)`, the same on every rank.
    """
    wide = tf.float32 if query.dtype in (tf.float16, tf.bfloat16) else query.dtype
    heads = key.shape[2]
    layout = axis.layout(mask.tokens)
    own = tf.cast(query, wide) * tf.cast(scale, wide)
    q = _split_heads(own, heads)
    k, v = (tf.expand_dims(tf.transpose(each, [0, 2, 1, 3]), 2) for each in (key, value))
    attention = BlockAttention(
        _FUNCTIONS,
        layout,
        axis.rank,
        causal=mask.causal,
        window=mask.window,
        mask=mask.of_blocks(heads),
        dropped=_dropout(rate, seed, axis.rank) if seed is not None else None,
    )

    def shift(arrays: Sequence[tf.Tensor], rows: int, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return axis.shift(arrays, rows, after)

    @differentiable_once("attention over divided tokens")
    def attend(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Any:
        output, sums = ring.attend(attention, shift, q, k, v)

        def gradients(gradient: tf.Tensor) -> Any:
            of_q, of_k, of_v = ring.gradients(attention, shift, gradient, q, k, v, output, sums)
            return of_q, tf.cast(of_k, k.dtype), tf.cast(of_v, v.dtype)

        return output, gradients

    return tf.cast(_joined_heads(attend(q, k, v)), value.dtype)


def by_heads(
    axis: KerasAxis,
    compute: Callable[..., Any],
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    mask: SequenceMask,
    *args: Any,
) -> tf.Tensor:
    """Return the output of this rank's queries, computed as some heads of all tokens. Differentiable; collective.

    Jacobs et al. 2023 (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), section 3.

    Args:
        axis: the ranks.
        compute: Keras' own attention, of queries, keys, values, a mask and what follows.
        query: of this rank's tokens; the heads divide.
        key: the same, with as many heads.
        value: the same.
        mask: what hides keys.
        args: for `compute`.
    """
    tokens = mask.tokens
    seen = mask.of_all()
    if seen is not None and seen.shape[1] != 1:
        own = seen.shape[1] // axis.size
        seen = seen[:, axis.rank * own : (axis.rank + 1) * own]
    output, _ = compute(*(axis.to_heads(each, tokens) for each in (query, key, value)), seen, *args)
    return axis.to_rows(output, tokens)


def _split_heads(query: tf.Tensor, heads: int) -> tf.Tensor:
    """Return `(batch, heads of keys, groups, tokens, width)`."""
    _, tokens, number, width = query.shape
    split = tf.reshape(query, [-1, tokens, heads, number // heads, width])
    return tf.transpose(split, [0, 2, 3, 1, 4])


def _joined_heads(output: tf.Tensor) -> tf.Tensor:
    """Return `(batch, tokens, heads, width)`."""
    _, heads, groups, tokens, width = output.shape
    return tf.reshape(tf.transpose(output, [0, 3, 1, 2, 4]), [-1, tokens, heads * groups, width])


def _dropout(rate: float, seed: tf.Tensor, rank: int) -> Callable[[tf.Tensor, int], tf.Tensor]:
    def factors(weights: tf.Tensor, number: int) -> tf.Tensor:
        own = tf.cast(seed, tf.int64) + tf.constant([rank, number], tf.int64)
        kept = tf.random.stateless_uniform(tf.shape(weights), own, dtype=tf.float32) >= rate
        return tf.cast(kept, weights.dtype) / (1 - rate)

    return factors
