"""Attention of this rank's queries to the keys and values of all ranks, as `jax.nn.dot_product_attention` has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from unidist.errors import UsageError
from unidist_context_parallel._jax.axis import JaxAxis
from unidist_context_parallel._jax.functions import JaxFunctions
from unidist_context_parallel.attention import ring
from unidist_context_parallel.attention.blocks import BlockAttention, Mask
from unidist_context_parallel.layout.sequence import SequenceLayout, zigzag

_FUNCTIONS = JaxFunctions()


@dataclass(frozen=True)
class Rules:
    """The settings of an attention call.

    Args:
        mask: None, or `(batch or 1, heads or 1, queries or 1, all tokens or 1)`, of bool.
        causal: a query sees keys up to its own position.
        window: None, or a query sees keys at a smaller distance alone.
        scale: of the scores; None: 1/sqrt(width).
    """

    mask: Any
    causal: bool
    window: int | None
    scale: float | None


def by_ring(
    axis: JaxAxis,
    layout: SequenceLayout,
    q: Any,
    k: Any,
    v: Any,
    rules: Rules,
) -> Any:
    """Return the output `(batch, tokens, heads, width)`. Differentiable; collective.

    Args:
        axis: the ranks.
        layout: of the tokens.
        q: `(batch, tokens of this rank, heads, width)`.
        k: `(batch, tokens of this rank, heads of keys, width)`.
        v: the same.
        rules: with a mask of this rank's queries.
    """
    return _by_blocks(layout, axis.rank, axis.shift, q, k, v, rules)


def by_gather(
    axis: JaxAxis,
    layout: SequenceLayout,
    q: Any,
    k: Any,
    v: Any,
    rules: Rules,
) -> Any:
    """Return the output with all keys and values gathered; see `by_ring`."""
    keys, values = axis.gathered(k, layout, 1), axis.gathered(v, layout, 1)
    seen = _and(rules.mask, _by_place(layout.positions(axis.rank), layout.size, rules))
    return jax.nn.dot_product_attention(q, keys, values, mask=seen, scale=rules.scale)


def by_heads(
    axis: JaxAxis,
    layout: SequenceLayout,
    q: Any,
    k: Any,
    v: Any,
    rules: Rules,
) -> Any:
    """Return the output with tokens exchanged for heads; see `by_ring`, but for the mask, which has all queries.

    Jacobs et al. 2023 (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), section 3.
    """
    heads, of_keys = q.shape[2], k.shape[2]
    if heads % axis.size:
        raise UsageError(
            f"context={axis.size}:exchange=ulysses divides the heads of an attention over the ranks, and {heads} heads "
            f"do not divide by {axis.size}. Use exchange=ring or exchange=gather"
        )
    if of_keys % axis.size:
        k, v = (jnp.repeat(each, heads // of_keys, 2) for each in (k, v))
    if rules.mask is not None and rules.mask.shape[1] > 1:
        own = heads // axis.size
        rules = replace(rules, mask=rules.mask[:, axis.rank * own : (axis.rank + 1) * own])
    q, k, v = (axis.to_heads(each, layout) for each in (q, k, v))
    alone = zigzag(layout.size, 1)
    output = _by_blocks(alone, 0, _stay, q, k, v, rules)
    return axis.to_rows(output, layout)


def _stay(arrays: Sequence[Any], rows: int, after: Sequence[Any]) -> list[Any]:
    """Return the arrays: the next rank of one rank is itself."""
    return list(arrays)


def _by_place(queries: Any, num_keys: int, rules: Rules) -> Any:
    if not rules.causal and rules.window is None:
        return None
    rows, columns = jnp.asarray(queries, jnp.int32)[:, None], jnp.arange(num_keys, dtype=jnp.int32)[None, :]
    seen = columns <= rows if rules.causal else jnp.ones((len(queries), num_keys), bool)
    seen = seen if rules.window is None else seen & (jnp.abs(rows - columns) < rules.window)
    return seen[None, None]


def _and(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _by_blocks(
    layout: SequenceLayout,
    rank: int,
    shift: ring.Shift,
    q: Any,
    k: Any,
    v: Any,
    rules: Rules,
) -> Any:
    """Return the output of the queries of one rank of a layout; see `by_ring`."""
    batch, rows, heads, width = q.shape
    of_keys = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scale = 1 / math.sqrt(width) if rules.scale is None else rules.scale
    mask = rules.mask
    own = (q.astype(wide) * jnp.asarray(scale, wide)).reshape(batch, rows, of_keys, heads // of_keys, width)
    if mask is not None:
        groups = (1, 1) if mask.shape[1] == 1 else (of_keys, heads // of_keys)
        mask = mask.reshape(mask.shape[0], *groups, *mask.shape[2:])

    def attention(pairs: Any) -> BlockAttention:
        return BlockAttention(
            _FUNCTIONS,
            layout,
            rank,
            causal=rules.causal,
            window=rules.window,
            mask=None if pairs is None else Mask(pairs=pairs),
        )

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, pairs: Any) -> Any:
        return ring.attend(attention(pairs), shift, q, k, v)[0]

    def forward(q: Any, k: Any, v: Any, pairs: Any) -> Any:
        output, sums = ring.attend(attention(pairs), shift, q, k, v)
        return output, (q, k, v, pairs, output, sums)

    def backward(kept: Any, gradient: Any) -> Any:
        q, k, v, pairs, output, sums = kept
        found = ring.gradients(attention(pairs), shift, gradient, q, k, v, output, sums)
        return found[0], found[1].astype(k.dtype), found[2].astype(v.dtype), None

    attend.defvjp(forward, backward)
    keys, values = (each.transpose(0, 2, 1, 3)[:, :, None] for each in (k, v))
    output = attend(own.transpose(0, 2, 3, 1, 4), keys, values, mask)
    return output.transpose(0, 3, 1, 2, 4).reshape(batch, rows, heads, v.shape[3]).astype(q.dtype)
