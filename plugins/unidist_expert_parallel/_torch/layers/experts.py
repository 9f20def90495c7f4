"""The experts of a layer: two or three matrices each, stacked, or a list of any modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist_expert_parallel.layout.owners import held_experts

ExpertKind = Literal["swiglu", "gelu", "relu"]


class ExpertStack(nn.Module):
    """Feed-forward networks of one shape: `down(silu(gate(x)) * up(x))`, or `down(gelu(up(x)))`, `down(relu(up(x)))`.

    Args:
        num_experts: in this process.
        width: of inputs and outputs.
        hidden: width in between.
        kind: "swiglu" (Shazeer 2020, https://arxiv.org/abs/2002.05202), "gelu" or "relu".
        bias: add biases.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        gate: of swiglu, `(num_experts, hidden, width)`; None else.
        up: `(num_experts, hidden, width)`.
        down: `(num_experts, width, hidden)`.
        gate_bias: `(num_experts, hidden)`, or None, as `up_bias` and `down_bias`.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden: int,
        *,
        kind: ExpertKind = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        gated = kind == "swiglu"
        self.gate = made(hidden, width) if gated else None
        self.up = made(hidden, width)
        self.down = made(width, hidden)
        self.gate_bias = made(hidden) if gated and bias else None
        self.up_bias = made(hidden) if bias else None
        self.down_bias = made(width) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every expert the values that `nn.Linear` begins with."""
        for weight, bias in ((self.gate, self.gate_bias), (self.up, self.up_bias), (self.down, self.down_bias)):
            if weight is None:
                continue
            bound = 1.0 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return what each expert makes of its rows, see `dispatch.Compute`."""
        # One unbind in place of an index for each: its gradient is one stack in place of a sum of whole ones.
        gates, ups, downs = _unbound(self.gate, counts), self.up.unbind(), self.down.unbind()
        gate_biases, up_biases, down_biases = (
            _unbound(bias, counts) for bias in (self.gate_bias, self.up_bias, self.down_bias)
        )
        results = []
        for number, part in enumerate(torch.split(rows, list(counts))):
            inner = F.linear(part, ups[number], up_biases[number])
            gate = gates[number]
            if gate is not None:
                inner = F.silu(F.linear(part, gate, gate_biases[number])) * inner
            else:
                inner = F.gelu(inner) if self.kind == "gelu" else F.relu(inner)
            results.append(F.linear(inner, downs[number], down_biases[number]))
        return torch.cat(results)

    def keep(self, rank: int, size: int) -> None:
        """Drop the experts of the other ranks; the parameters stay the same objects."""
        held = held_experts(self.up.shape[0], rank, size)
        keep_rows(list(self.parameters()), held)


class ExpertList(nn.ModuleList):
    """Any modules, each from `(rows, width)` to as many rows. They are also called with no rows."""

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return what each expert makes of its rows, see `dispatch.Compute`."""
        return torch.cat([expert(part) for expert, part in zip(self, torch.split(rows, list(counts)), strict=True)])

    def keep(self, rank: int, size: int) -> None:
        """Drop the experts of the other ranks; the remaining ones are numbered from 0."""
        held = held_experts(len(self), rank, size)
        for number in reversed(range(len(self))):
            if number not in held:
                del self[number]


def _unbound(weights: torch.Tensor | None, counts: Sequence[int]) -> Sequence[torch.Tensor | None]:
    return (None,) * len(counts) if weights is None else weights.unbind()


def keep_rows(parameters: Sequence[nn.Parameter], held: range) -> None:
    """Leave each parameter these indices of its first dim; it stays the same object."""
    for parameter in parameters:
        parameter.data = parameter.data[held.start : held.stop].clone()
