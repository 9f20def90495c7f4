"""The mixture-of-experts layer of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from unidist_expert_parallel._torch.layers.axis import ExpertAxis, replicas_in_training
from unidist_expert_parallel._torch.layers.dispatch import dispatch, own_tokens
from unidist_expert_parallel._torch.layers.experts import ExpertKind, ExpertList, ExpertStack
from unidist_expert_parallel._torch.layers.losses import LastPass, router_losses
from unidist_expert_parallel._torch.layers.router import Router, Softmax, choose, counts_of, within_capacity
from unidist_expert_parallel.layout.arguments import check_arguments
from unidist_expert_parallel.layout.capacity import capacity
from unidist_torch.cuda_graphs import refuse_capture


class MixtureOfExperts(nn.Module):
    """Sends each token to the `top_k` of many experts that its router scores highest, and adds up what they return.

    In one process it computes all experts, and needs no unidist. `--strategy expert=N` divides the experts over ranks,
    and the results stay those of one process with the tokens of all ranks. Then every rank calls it equally often,
    forward and backward, with any number of tokens.

    Args:
        width: of tokens.
        num_experts: of the layer, on all ranks together.
        hidden: width within an expert; default: 4 times `width`.
        experts: these modules in place of matrices of the layer's own: `num_experts` of one shape, each from
            `(rows, width)` to as many rows. An expert is also called with no rows.
        kind: "swiglu", "gelu" or "relu", see `ExpertStack`.
        bias: the experts have biases.
        top_k: experts that a token goes to.
        softmax: "before": an expert's weight is its probability among all experts; "after": among the chosen ones.
        normalize: divide the weights of the chosen experts by their sum. Default: if `top_k` is above 1 (with one, the
            router would get no gradient).
        capacity_factor: an expert takes at most so many times the tokens that it would get if all got equally many;
            the others are dropped, which the layer returns zeros for. First choices come before second ones, then the
            order of tokens, rank by rank. Default: none are dropped.
        balance_coefficient: of the balance loss in `auxiliary_loss`.
        z_coefficient: of the router z-loss in `auxiliary_loss`.
        jitter: in training, the router sees each token multiplied by random numbers of [1 - jitter, 1 + jitter].
        device: of the parameters.
        dtype: of the parameters. Probabilities have at least 32 bits.

    Attributes:
        experts: those of this process.
        router: scores the experts.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        hidden: int | None = None,
        experts: Iterable[nn.Module] | None = None,
        kind: ExpertKind = "swiglu",
        bias: bool = False,
        top_k: int = 2,
        softmax: Softmax = "before",
        normalize: bool | None = None,
        capacity_factor: float | None = None,
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        jitter: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_arguments(num_experts, top_k, kind, softmax, capacity_factor)
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter={jitter}: give 0 to 1")
        self.width = width
        self.num_experts = num_experts
        self.top_k = top_k
        self.softmax: Softmax = softmax
        self.normalize = top_k > 1 if normalize is None else normalize
        self.capacity_factor = capacity_factor
        self.balance_coefficient = balance_coefficient
        self.z_coefficient = z_coefficient
        self.jitter = jitter
        self.router = Router(width, num_experts, device=device, dtype=dtype)
        self.experts: ExpertStack | ExpertList
        if experts is None:
            self.experts = ExpertStack(
                num_experts, width, hidden or 4 * width, kind=kind, bias=bias, device=device, dtype=dtype
            )
        else:
            self.experts = ExpertList(experts)
            _check_list(self.experts, num_experts)
        self._axis: ExpertAxis | None = None
        self._last = LastPass()

    @property
    def has_losses(self) -> bool:
        """Whether it has losses for `auxiliary_loss`."""
        return self.balance_coefficient != 0.0 or self.z_coefficient != 0.0

    @property
    def unidist_runs_together(self) -> bool:
        """Whether every rank has to call it: elastic steps then call it on a rank without samples, too."""
        return self.has_losses or self.capacity_factor is not None

    @property
    def balance_loss(self) -> torch.Tensor | None:
        """The balance loss of the last pass in training, without its coefficient; None without coefficients."""
        return self._last.balance

    @property
    def z_loss(self) -> torch.Tensor | None:
        """The router z-loss of the last pass in training, likewise."""
        return self._last.z

    def divide(self, axis: ExpertAxis) -> None:
        """Keep this rank's experts, and find the others along the axis. For the strategy."""
        self.experts.keep(axis.rank, axis.size)
        self._axis = axis

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
    def forward(self, x: Any) -> Any:
        """Take tokens of any shape `(..., width)`, return the same. Collective if the experts are divided."""
        part = own_tokens(x)
        return self._computed(x) if part is None else x.like(self._computed(part))

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        if self._axis is not None:
            refuse_capture("a layer of divided experts", x)
        tokens = x.reshape(-1, self.width)
        seen = tokens
        if self.jitter and self.training:
            seen = tokens * torch.empty_like(tokens).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        scores = self.router(seen)
        probabilities, weights, index = choose(scores, self.top_k, softmax=self.softmax, normalize=self.normalize)
        counts = counts_of(index, self.num_experts)
        has_losses = self.has_losses and self.training
        if has_losses or self.capacity_factor is not None:
            # Where the experts are whole, a rank may evaluate alone.
            replicas = self._axis or (replicas_in_training() if self.training else None)
            everyone = counts.unsqueeze(0) if replicas is None else replicas.gathered_counts(counts)
            if has_losses:
                self._last.balance, self._last.z = router_losses(scores, probabilities, everyone, replicas)
            if self.capacity_factor is not None:
                limit = capacity(int(everyone[:, 0].sum()), self.num_experts, self.top_k, self.capacity_factor)
                replica = 0 if replicas is None else replicas.replica
                kept = within_capacity(index, everyone, replica, limit)
                index = index.masked_fill(~kept, self.num_experts)
        known = None if self.capacity_factor is not None else counts.sum(0).tolist()
        found = dispatch(tokens, index, self.num_experts, self.experts, self._axis, known)
        mixed = (found * weights.to(found.dtype).unsqueeze(-1)).sum(1)
        return mixed.to(x.dtype).view(x.shape)

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        return f"width={self.width}, num_experts={self.num_experts}, top_k={self.top_k}"


def _check_list(experts: ExpertList, num_experts: int) -> None:
    if len(experts) != num_experts:
        raise ValueError(f"num_experts={num_experts}, and there are {len(experts)} modules in experts")
    forms = [[(name, tuple(each.shape)) for name, each in expert.named_parameters()] for expert in experts]
    if any(form != forms[0] for form in forms):
        raise ValueError("the modules in experts have parameters of different names or shapes; give equal ones")
