"""Scaled dot-product attention of divided queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist_context_parallel._torch.attention.blocks import AttentionJob
from unidist_context_parallel._torch.attention.exchange import Way, attend
from unidist_context_parallel._torch.attention.heads import check_heads, to_heads, to_rows
from unidist_context_parallel._torch.divided.axis import take_rows
from unidist_context_parallel._torch.divided.tensor import SequenceTensor, align, gathers, refuse, whole
from unidist_context_parallel._torch.rules.randomness import draw_seed, own_numbers
from unidist_context_parallel._torch.rules.registration import divided, parameters_of, rule

_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa"
_DEFAULTS = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}


@rule("scaled_dot_product_attention")
def _attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    q, k, v, mask, dropout, causal, scale, gqa = parameters_of(_NAMES, _DEFAULTS, args, kwargs)
    if causal and mask is not None:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    queries = divided(q)
    options = {"dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": gqa}
    if queries is None:
        first = next(each for each in (k, v, mask) if isinstance(each, SequenceTensor))
        gathers(func, "has queries that are not divided", first.axis)
        return func(q, whole(k), whole(v), whole(mask), **options)
    ndim = queries.local.ndim
    at = queries.dim_divided - ndim
    if at == -1 or ndim < 3 or ndim > 4:
        refuse(func, f"has queries of shape {tuple(queries.shape)} with the sequence in dim {queries.dim_divided}")
    if at < -2:  # samples or heads are divided: a rank has all tokens of each
        return _by_sample(func, queries, (k, v, mask), at, options)
    return _by_token(queries, k, v, mask, options)


def _by_sample(
    func: Callable[..., Any], queries: SequenceTensor, others: tuple[Any, ...], at: int, options: dict[str, Any]
) -> Any:
    if at == -3 and options["enable_gqa"]:
        refuse(func, "has divided heads that share keys")
    k, v, mask = (align(each, queries, at) for each in others)
    if not queries.local.numel():
        width = v.shape[-1]
        return queries.like((queries.local.sum() + k.sum() + v.sum()).expand(*queries.local.shape[:-1], width))
    with own_numbers(queries.local.device, queries.axis.rank):
        return queries.like(F.scaled_dot_product_attention(queries.local, k, v, mask, **options))


def _by_token(queries: SequenceTensor, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> Any:
    axis, layout = queries.axis, queries.rows
    q, three = queries.local, queries.local.ndim == 3
    keys, values = divided(k), divided(v)
    key_layout = None
    if (
        keys is not None
        and values is not None
        and keys.rows is values.rows
        and keys.dim_divided == values.dim_divided == keys.local.ndim - 2
    ):
        key_layout, k, v = keys.rows, keys.local, values.local
    else:
        k, v = whole(k), whole(v)
    if isinstance(mask, SequenceTensor):
        divided(mask)
        rows = mask.dim_divided == mask.local.ndim - 2 and mask.rows is layout
        mask = mask.local if rows else whole(mask)
        mask = mask if rows or mask.shape[-2] == 1 else take_rows(mask, layout, -2, axis.rank)
    elif mask is not None:
        if mask.ndim < 2:
            mask = mask.reshape(1, -1)
        if mask.shape[-2] != 1 or layout.size == 1:
            mask = take_rows(mask, layout, -2, axis.rank)
    if three:  # (batch times heads, tokens, width)
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (each.to(dtype) if each.dtype != torch.float64 else each for each in (q, k, v))
    batch = max(q.shape[0], k.shape[0], v.shape[0])
    q, k, v = (each.expand(batch, *each.shape[1:]) for each in (q, k, v))
    groups = q.shape[1] // max(1, k.shape[1])
    if not options["enable_gqa"] and q.shape[1] != k.shape[1]:
        heads = max(q.shape[1], k.shape[1])
        q, k, v = (each.expand(-1, heads, -1, -1) for each in (q, k, v))
        groups = 1
    scale = options["scale"] if options["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    if axis.exchange == "ulysses" and key_layout is not None:
        result = _by_heads(queries, key_layout, q, k, v, mask, {**options, "scale": scale})
    else:
        seed = draw_seed(axis.rank) if options["dropout_p"] else 0
        learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        positions = layout.positions(axis.rank)
        job = AttentionJob(scale, options["is_causal"], positions, groups, options["dropout_p"], seed, learns)
        way: Way = "here" if key_layout is None else ("gather" if axis.exchange == "gather" else "ring")
        result = attend(job, way, axis, key_layout, q, k, v, _four_dims(mask))
    return queries.like(result.squeeze(0) if three else result)


def _by_heads(
    queries: SequenceTensor,
    key_layout: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    axis, layout = queries.axis, queries.rows
    check_heads(q.shape[1], axis)
    if k.shape[1] % axis.size:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    if mask is not None:
        if mask.shape[-2] != 1 or layout.size == 1:
            mask = axis.gathered(mask, layout, mask.ndim - 2)
        if mask.ndim > 2 and mask.shape[-3] > 1:
            own = mask.shape[-3] // axis.size
            mask = mask.narrow(-3, axis.rank * own, own)
    heads = (to_heads(q, layout, axis), to_heads(k, key_layout, axis), to_heads(v, key_layout, axis))
    with own_numbers(q.device, axis.rank):
        result = F.scaled_dot_product_attention(*heads, mask, **{**options, "enable_gqa": k.shape[1] != q.shape[1]})
    return to_rows(result, layout, axis)


def _four_dims(mask: torch.Tensor | None) -> torch.Tensor | None:
    while mask is not None and mask.ndim < 4:
        mask = mask.unsqueeze(0)
    return mask
