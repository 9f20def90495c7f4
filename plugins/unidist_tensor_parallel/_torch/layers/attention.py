"""`torch.nn.MultiheadAttention` cut by heads: each rank computes some heads, from the projections to the output."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist.errors import UsageError
from unidist_tensor_parallel._torch.layers.linear import cut_row
from unidist_tensor_parallel._torch.layers.region import Region
from unidist_tensor_parallel.layout.cuts import Cut, Heads
from unidist_torch.models.guarded_parameter import plain_part

_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")

# In comments: B batch, L queries, S keys, H heads of this rank, D width of a head.


class HeadsOfAttention(torch.nn.MultiheadAttention):
    """Has some of the heads. `unidist_` attributes are set by `cut_attention`."""

    unidist_region: Region
    unidist_heads: Heads

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `torch.nn.MultiheadAttention.forward`. Collective."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise UsageError("attention that is cut over ranks takes no nested tensors; use padding and a mask")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as in one process
        region, axis = self.unidist_region, self.unidist_region.axis
        batched = query.dim() == 3
        entered: dict[int, torch.Tensor] = {}
        for each in (query, key, value):
            if id(each) not in entered:
                whole = region.enter(each)
                first = whole.unsqueeze(0) if not batched else whole if self.batch_first else whole.transpose(0, 1)
                entered[id(each)] = first
        inputs = [entered[id(each)] for each in (query, key, value)]  # (B, L or S, width)
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._projected(inputs)  # (B, L or S, H * D)
        region.begin_cut(self, q)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([each, plain_part(bias).expand(each.shape[0], -1, -1)], 1)
                for each, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        q, k, v = (each.view(*each.shape[:2], -1, self.head_dim).transpose(1, 2) for each in (q, k, v))  # (B, H, ., D)
        if self.add_zero_attn:
            k, v = (F.pad(each, (0, 0, 0, 1)) for each in (k, v))
        added = k.shape[2] - inputs[1].shape[1]
        causal_alone = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal_alone else self._mask(attn_mask, key_padding_mask, q, added)
        weights = None
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout)
            outputs = weights @ v
        else:
            outputs = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal_alone)
        outputs = outputs.transpose(1, 2).flatten(2)  # (B, L, H * D)
        if batched and not self.batch_first:
            outputs = outputs.transpose(0, 1)
        outputs = self.out_proj(outputs if batched else outputs.squeeze(0))
        if weights is None:
            return outputs, None
        counts = [self.unidist_heads.local_heads(rank) for rank in range(axis.size)]
        if average_attn_weights:
            weights = axis.leave(weights.sum(1)) / self.unidist_heads.heads
        else:
            weights = axis.gathered(weights, counts, 1)
        return outputs, weights if batched else weights.squeeze(0)

    def _projected(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        bias = None if self.in_proj_bias is None else plain_part(self.in_proj_bias)
        biases = [None] * 3 if bias is None else bias.chunk(3)
        # torch's annotation leaves None out
        packed: torch.Tensor | None = (
            self.in_proj_weight if self.in_proj_weight is None else plain_part(self.in_proj_weight)
        )
        if packed is None:
            weights = [plain_part(getattr(self, name)) for name in _PROJECTIONS]
        elif inputs[0] is inputs[1] is inputs[2]:
            return list(F.linear(inputs[0], packed, bias).chunk(3, -1))
        else:
            weights = list(packed.chunk(3))
        return [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, added: int
    ) -> torch.Tensor | None:
        """Return the term added to the scores, `(B or 1, H or 1, L or 1, S)`, of this rank's heads."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.dim() == 3:
                heads = self.unidist_heads
                first = heads.first_head(self.unidist_region.axis.rank)
                mask = mask.view(-1, heads.heads, *mask.shape[1:])[:, first : first + q.shape[1]]
            mask = F.pad(mask, (0, added))
        if padding is not None:
            padded = F.pad(_additive(padding, q.dtype), (0, added))[:, None, None]
            mask = padded if mask is None else mask + padded
        return mask


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def heads_of(layer: torch.nn.MultiheadAttention, size: int, path: str) -> Heads:
    """Return the division of an attention's heads.

    Raises:
        ConfigurationError: there are fewer heads than ranks.
    """
    return Heads(layer.num_heads, layer.num_heads, layer.head_dim, size, what=path)


def attention_cuts(heads: Heads, layer: torch.nn.MultiheadAttention) -> dict[str, Cut]:
    """Return the cuts of an attention's parameters, by their names in it."""
    cuts = {}
    if "in_proj_weight" in dict(layer.named_parameters(recurse=False)):
        cuts["in_proj_weight"] = heads.fused(0)
    else:
        cuts |= {name: heads.queries(0) for name in _PROJECTIONS}
    if layer.in_proj_bias is not None:
        cuts["in_proj_bias"] = heads.fused(0)
    if layer.bias_k is not None:
        cuts |= {"bias_k": heads.queries(2), "bias_v": heads.queries(2)}
    cuts["out_proj.weight"] = heads.queries(1)
    return cuts


def cut_attention(layer: Any, heads: Heads, region: Region) -> None:
    """Let an attention compute the heads of this rank. Its parameters are cut already."""
    layer.__class__ = HeadsOfAttention
    layer.unidist_region, layer.unidist_heads = region, heads
    cut_row(layer.out_proj, heads.queries(1), region)
