"""Functions by which a loss function of JAX computes this rank's share of a sequence.

Without the strategy there is one share, the whole sequence: a script works with and without it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist.errors import UsageError
from unidist_context_parallel._jax.attention import Rules, by_gather, by_heads, by_ring
from unidist_context_parallel._jax.axis import JaxAxis, current_axis

__all__ = ["attention", "mean", "positions", "split", "whole"]


def split(batch: Any, *, dim: int = 1) -> Any:
    """Return this rank's tokens of whole arrays. Collective the first time, when the ranks compare what they have.

    Rank r of N has chunks r and 2N-1-r of 2N, so that all have as much to do under a causal mask.

    Args:
        batch: a tree of arrays, the same on all ranks of the axis `context`.
        dim: of the tokens in each of them.

    Raises:
        UsageError: the tokens do not divide by 2N; an array has no such dim; the ranks have different arrays.
    """
    axis = current_axis()
    leaves, structure = jax.tree.flatten(batch)
    for each in leaves:
        if np.ndim(each) <= dim:
            raise UsageError(f"ud.context.split: an array of shape {np.shape(each)} has no dim {dim} of tokens")
    if axis.size == 1:
        return batch
    layouts = [axis.layout(each.shape[dim]) for each in leaves]
    axis.compare(leaves)
    own = [
        (np if isinstance(each, np.ndarray) else jnp).take(each, layout.positions(axis.rank), dim)
        for each, layout in zip(leaves, layouts, strict=True)
    ]
    return jax.tree.unflatten(structure, own)


def positions(tokens: int) -> jax.Array:
    """Return the positions of this rank's tokens in the sequence, `(tokens of this rank,)` of int32, ascending.

    For embeddings of positions, and for rotary ones.

    Args:
        tokens: of the whole sequence.
    """
    axis = current_axis()
    if axis.size == 1:
        return jnp.arange(tokens, dtype=jnp.int32)
    return jnp.asarray(axis.layout(tokens).positions(axis.rank), jnp.int32)


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
) -> Any:
    """Return `jax.nn.dot_product_attention` of this rank's queries to the keys and values of all ranks. Collective.

    For self-attention. Keys of another sequence are whole on every rank: call JAX's function for these.

    Args:
        query: `(batch, tokens of this rank, heads, width)`, or without batch.
        key: the same, with as many heads or a part of them (grouped queries).
        value: like the keys.
        mask: None, or of bool, of the whole sequence: broadcast to `(batch, heads, tokens, tokens)`, True where a query
            sees a key.
        scale: of the scores; default 1/sqrt(width).
        is_causal: a query sees keys up to its own position.
        local_window_size: as in JAX: a query sees so many keys on its left and on its right besides its own; with
            `is_causal` the right ones are hidden.

    Returns:
        As the query, in its type.

    Raises:
        UsageError: these are no shares of a sequence that was divided by `split` or `positions`, or the mask has other
            sizes.
    """
    axis = current_axis()
    if axis.size == 1:
        options: dict[str, Any] = {"scale": scale, "is_causal": is_causal, "local_window_size": local_window_size}
        return jax.nn.dot_product_attention(query, key, value, mask=mask, **options)
    if jnp.ndim(query) == 3:
        result = attention(
            query[None], key[None], value[None], mask=mask, scale=scale, is_causal=is_causal,
            local_window_size=local_window_size,
        )  # fmt: skip
        return result[0]
    if key.shape[1] != query.shape[1]:
        raise UsageError(
            f"ud.context.attention was given {query.shape[1]} queries and {key.shape[1]} keys. It is for keys of the "
            "same tokens; keys of another sequence are whole on every rank: call jax.nn.dot_product_attention"
        )
    if query.shape[2] % key.shape[2]:
        raise UsageError(f"{query.shape[2]} heads of queries are no multiple of {key.shape[2]} heads of keys")
    layout = axis.layout_of_local(query.shape[1])
    compute = {"ring": by_ring, "gather": by_gather, "ulysses": by_heads}[axis.exchange]
    window = _window(local_window_size, is_causal=is_causal)
    rules = Rules(_own_mask(axis, mask, layout.size), is_causal, window, scale)
    return compute(axis, layout, query, key, value, rules)


def mean(values: Any, *, where: Any = None) -> jax.Array:
    """Return the mean over the tokens of all ranks along the axis, a scalar. Differentiable; collective.

    Args:
        values: of this rank's tokens, any shape.
        where: None, or of the same shape: which of them count, so that ranks may have other numbers of them; the others
            may be no numbers. If none counts anywhere, the mean is not a number.
    """
    axis = current_axis()
    values = jnp.asarray(values)
    wide = jnp.promote_types(values.dtype, jnp.float32)  # 16 bits cannot count tokens
    total = jnp.sum(values.astype(wide), where=where)
    counted = True if where is None else where
    count = jnp.sum(jnp.broadcast_to(counted, values.shape), dtype=wide)
    if axis.size > 1:
        total, count = axis.summed(total), axis.summed(jax.lax.stop_gradient(count))
    return (total / count).astype(values.dtype)


def whole(array: Any, *, dim: int = 1) -> Any:
    """Return the tokens of all ranks, in their order. Differentiable; collective.

    Args:
        array: this rank's tokens.
        dim: of the tokens.
    """
    axis = current_axis()
    if axis.size == 1:
        return array
    return axis.gathered(jnp.asarray(array), axis.layout_of_local(array.shape[dim]), dim)


def _own_mask(axis: JaxAxis, mask: Any, tokens: int) -> Any:
    """Return the rows of this rank's queries, with Ulysses all rows; or None."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.dtype != jnp.bool_ or mask.ndim != 4 or any(size not in (1, tokens) for size in mask.shape[2:]):
        raise UsageError(
            f"ud.context.attention: a mask {mask.dtype}{list(mask.shape)}; it is to be of bool, for the whole "
            f"sequence: (batch, heads, {tokens}, {tokens}), where any may be 1"
        )
    if axis.exchange == "ulysses" or mask.shape[2] == 1:
        return mask
    return jnp.take(mask, axis.layout(tokens).positions(axis.rank), 2)


def _window(size: int | tuple[int, int] | None, *, is_causal: bool) -> int | None:
    if size is None:
        return None
    left, right = (size, size) if isinstance(size, int) else size
    if left != right and not is_causal:
        raise UsageError(
            f"ud.context.attention: local_window_size={size!r}: without is_causal it has to be as wide on both sides"
        )
    return left + 1
