"""Experts of other libraries' models, found by their structure, as transformers has them since version 5.

Such a module has the weights of all experts stacked in the first dim of its parameters, and is called with tokens, the
numbers of their experts and the weights of these. Its own forward then computes the experts of this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unidist.mixins import with_mixin
from unidist_expert_parallel._torch.layers.axis import ExpertAxis
from unidist_expert_parallel._torch.layers.dispatch import dispatch, own_tokens
from unidist_expert_parallel._torch.layers.experts import keep_rows
from unidist_expert_parallel.layout.owners import held_experts

LOOKED_FOR = (
    "modules with `num_experts`, parameters that have an expert in each index of their first dim, and "
    "forward(hidden_states, top_k_index, top_k_weights), as in transformers' Mixtral, Qwen-MoE and OLMoE"
)


def is_stacked(module: nn.Module) -> bool:
    """Return whether a module holds stacked experts, and takes tokens, numbers and weights of experts."""
    count = getattr(module, "num_experts", None)
    own = list(module.parameters())
    if not isinstance(count, int) or count < 2 or not any(each.dim() >= 3 for each in own):
        return False
    if any(not each.dim() or each.shape[0] != count for each in own) or next(module.buffers(), None) is not None:
        return False
    taken = list(inspect.signature(type(module).forward).parameters)[1:4]
    return len(taken) == 3 and ("index" in taken[1] or "indices" in taken[1]) and "weight" in taken[2]


def divide_stacked(module: Any, axis: ExpertAxis) -> None:
    """Leave a module this rank's experts; its forward sends tokens to the others."""
    held = held_experts(module.num_experts, axis.rank, axis.size)
    keep_rows(list(module.parameters()), held)
    module.num_experts = len(held)
    module.__class__ = with_mixin(type(module), DividedExperts)
    module.unidist_axis = axis


class DividedExperts(nn.Module):
    """Stands before the class of a module with stacked experts.

    Attributes:
        num_experts: of this rank.
        unidist_axis: whose ranks have the others.
    """

    num_experts: int
    unidist_axis: ExpertAxis

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
    def forward(self, tokens: Any, index: Any, weights: Any) -> Any:
        """Take `(tokens, width)`, and numbers and weights of experts `(tokens, k)`. Collective over the axis."""
        part = own_tokens(tokens)
        if part is None:
            return self._computed(tokens, index, weights)
        return tokens.like(self._computed(part, index.local, weights.local))

    def _computed(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = tokens.reshape(-1, tokens.shape[-1])
        index, weights = index.reshape(flat.shape[0], -1), weights.reshape(flat.shape[0], -1)
        total = self.num_experts * self.unidist_axis.size
        found = dispatch(flat, index, total, self._compute, self.unidist_axis)
        mixed = (found * weights.unsqueeze(-1).to(found.dtype)).sum(1)
        return mixed.to(tokens.dtype).view(tokens.shape)

    def _compute(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """See `dispatch.Compute`."""
        if not len(rows):  # the class would leave its parameters without gradients
            return rows + sum(parameter.reshape(-1)[:1].sum() * 0 for parameter in self.parameters())
        index = torch.arange(len(counts), device=rows.device)
        index = index.repeat_interleave(torch.tensor(counts, device=rows.device)).unsqueeze(1)
        found: torch.Tensor = super().forward(rows, index, torch.ones_like(index, dtype=rows.dtype))
        return found


class WholeBalanceLoss:
    """Replaces the balance loss of a library's model, that of one rank's tokens, by that of the tokens of all ranks.

    A hook of a model that returns `aux_loss`, `router_logits` and maybe `loss`. The formula is transformers' own.

    Args:
        axis: the ranks.
    """

    def __init__(self, axis: ExpertAxis) -> None:
        self.axis = axis

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        """Change the outputs in place. Collective over all replicas."""
        logits, local = getattr(outputs, "router_logits", None), getattr(outputs, "aux_loss", None)
        if not isinstance(logits, tuple) or not isinstance(local, torch.Tensor):
            return outputs
        bound = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
        mask = bound.get("attention_mask")
        sums = _sums(logits, model.num_experts, model.num_experts_per_tok, mask)
        whole = _loss(self.axis.total(sums))
        if outputs.loss is not None:
            outputs.loss = outputs.loss + model.router_aux_loss_coef * (whole - local)
        outputs.aux_loss = whole
        return outputs


def has_balance_loss(model: Any) -> bool:
    """Return whether a model of a library adds a balance loss if asked to."""
    return all(hasattr(model, name) for name in ("router_aux_loss_coef", "num_experts", "num_experts_per_tok"))


def _sums(logits: Sequence[torch.Tensor], num_experts: int, top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Return assignments and probabilities of each expert and the number of tokens, `(2 * num_experts + 1,)`."""
    scores = torch.cat([each.to(logits[0].device) for each in logits]).float()
    probabilities = scores.softmax(-1)
    chosen = probabilities.detach().topk(top_k, -1).indices
    counted = torch.ones(len(scores), device=scores.device)
    if mask is not None:
        counted = mask.reshape(-1).to(counted).repeat(len(logits))
    assigned = torch.zeros(num_experts, device=scores.device)
    assigned = assigned.scatter_add(0, chosen.reshape(-1), counted.repeat_interleave(top_k))
    return torch.cat((assigned, (probabilities * counted.unsqueeze(-1)).sum(0), counted.sum().reshape(1)))


def _loss(sums: torch.Tensor) -> torch.Tensor:
    num_experts = len(sums) // 2
    num_tokens = sums[-1].clamp(min=1)
    assigned, probabilities = sums[:num_experts] / num_tokens, sums[num_experts:-1] / num_tokens
    return num_experts * (assigned.detach() * probabilities).sum()
