"""One part of a block of attention, forward with its log-sum-exp, and backward from that of the whole row.

PyTorch's fused kernels where they apply; else the scores are computed as they are written in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Score:
    """Operations on the scores of a part.

    Args:
        scale: of products of queries and keys.
        causal: query i sees keys 0 to i; as many queries as keys.
        mask: None, or broadcast to `(batch, heads, queries, keys)`: of bool, True where a query sees a key, or added.
        dropout: probability with which weights are left out.
        seed: of those numbers.
        mask_gradient: where the gradient of the mask is added, or None.
    """

    scale: float
    causal: bool
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    mask_gradient: torch.Tensor | None = None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Return the output `(batch, heads, queries, width)`, its log-sum-exp `(batch, heads, queries)`, and the rest.

    A query that sees no key has the output 0 and the log-sum-exp -inf. None of the tensors is empty.
    """
    if _is_cpu_flash(q, v, score):
        mask = _additive(score.mask, q)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, score.causal, attn_mask=mask, scale=score.scale
        )
        if mask is not None:
            blind = (mask == -torch.inf).all(-1)
            lse = torch.where(blind.expand(lse.shape), -torch.inf, lse)
        return output, lse, ()
    if _is_cuda_flash(q, v, score):
        output, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, score.causal, False, scale=score.scale
        )
        return output, lse, tuple(rest[:6])
    scores = _scores(q, k, score)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp_(scores.sub_(_finite(lse)[..., None]))
    if score.dropout:
        weights.mul_(_kept(weights, score))
    return torch.matmul(weights, v.to(weights.dtype)), lse, ()


def backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    score: Score,
    rest: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this part's contributions to the gradients of q, k and v.

    Args:
        gradient: of the whole output.
        q: queries.
        k: keys.
        v: values.
        output: of all parts together.
        lse: of all parts together.
        score: as in forward.
        rest: what forward returned.
    """
    if _is_cpu_flash(q, v, score):
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, output, _finite(lse), 0.0, score.causal,
                attn_mask=_additive(score.mask, q), scale=score.scale,
            )
        )  # fmt: skip
        return found
    if _is_cuda_flash(q, v, score):
        cum_q, cum_k, max_q, max_k, seed, offset = rest
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, output, lse, cum_q, cum_k, max_q, max_k, 0.0, score.causal, seed, offset,
            scale=score.scale,
        )  # fmt: skip
        return found[0], found[1], found[2]
    weights = _scores(q, k, score)
    dtype = weights.dtype
    gradient, wide_q, wide_k, wide_v = (each.to(dtype) for each in (gradient, q, k, v))
    weights.sub_(_finite(lse)[..., None]).exp_()
    of_weights = torch.matmul(gradient, wide_v.transpose(-2, -1))
    dropped = weights
    if score.dropout:
        kept = _kept(weights, score)
        dropped = weights * kept
        of_weights.mul_(kept)
    of_v = torch.matmul(dropped.transpose(-2, -1), gradient)
    of_weights.sub_((gradient * output).sum(-1, keepdim=True))
    of_scores = of_weights.mul_(weights)
    if score.mask_gradient is not None:
        score.mask_gradient.add_(of_scores.sum_to_size(score.mask_gradient.shape))
    of_q = torch.matmul(of_scores, wide_k).mul_(score.scale)
    of_k = torch.matmul(of_scores.transpose(-2, -1), wide_q).mul_(score.scale)
    return of_q, of_k, of_v


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which parts are added up."""
    return torch.float32 if dtype in _HALF else dtype


def _scores(q: torch.Tensor, k: torch.Tensor, score: Score) -> torch.Tensor:
    dtype = accumulation_dtype(q.dtype)
    scores = torch.matmul(q.to(dtype), k.to(dtype).transpose(-2, -1)).mul_(score.scale)
    if score.causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores.masked_fill_(~seen, -torch.inf)
    if score.mask is not None:
        if score.mask.dtype == torch.bool:
            scores.masked_fill_(~score.mask.to(scores.device), -torch.inf)
        else:
            scores.add_(score.mask)
    return scores


def _kept(weights: torch.Tensor, score: Score) -> torch.Tensor:
    generator = torch.Generator(weights.device).manual_seed(score.seed)
    kept = torch.empty_like(weights).bernoulli_(1 - score.dropout, generator=generator)
    return kept.div_(1 - score.dropout)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _additive(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return like.new_zeros(mask.shape).masked_fill_(~mask.to(like.device), -torch.inf)
    return mask.to(like)


def _is_cpu_flash(q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
    return q.is_cpu and not score.dropout and score.mask_gradient is None and q.shape[-1] == v.shape[-1]


def _is_cuda_flash(q: torch.Tensor, v: torch.Tensor, score: Score) -> bool:
    """Never run on a GPU so far."""
    return (
        q.is_cuda
        and q.dtype in _HALF
        and not score.dropout
        and score.mask is None
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )
