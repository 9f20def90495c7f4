"""Optimizers of PyTorch that look at whole tensors: Muon in double precision, and rules for some tensors only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return what five Newton-Schulz iterations make of a matrix, as Muon does it, in the matrix' own type."""
    rows, columns = matrix.shape
    x = (matrix.T if rows > columns else matrix) / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if rows > columns else x


class MuonWithAdam(torch.optim.Optimizer):
    """One class with a flag for each group, as scripts write it: Muon for `use_muon`, else AdamW."""

    def __init__(self, params: Any, lr: float = 0.02, *, use_muon: bool = False) -> None:
        super().__init__(params, {"lr": lr, "use_muon": use_muon, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state, gradient = self.state[parameter], parameter.grad
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update = self._muon if group["use_muon"] else self._adam
                    parameter.add_(update(state, gradient, group), alpha=-group["lr"])

    def _muon(self, state: dict[str, Any], gradient: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - group["momentum"])
        rows, columns = gradient.shape
        return orthogonalized(gradient.lerp(momentum, group["momentum"])) * max(1, rows / columns) ** 0.5

    def _adam(self, state: dict[str, Any], gradient: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        first, second = (state.setdefault(name, torch.zeros_like(gradient)) for name in ("exp_avg", "exp_avg_sq"))
        state["step"] = state.get("step", 0) + 1
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.05)
        return first / (1 - 0.9 ** state["step"]) / ((second / (1 - 0.95 ** state["step"])).sqrt() + 1e-3)


def muon_groups(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups for `MuonWithAdam`: matrices apart from other parameters. Takes groups, or parameters."""
    given = list(groups)
    found: list[dict[str, Any]] = []
    for group in given if isinstance(given[0], dict) else [{"params": given}]:
        for use_muon in (True, False):
            chosen = [parameter for parameter in group["params"] if (parameter.dim() == 2) is use_muon]
            if chosen:
                found.append({**group, "params": chosen, "use_muon": use_muon})
    return found


class Composed(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, each an optimizer of its own, as one."""

    def __init__(self, params: Any) -> None:
        groups = muon_groups(params)
        muon = MuonWithAdam([group for group in groups if group["use_muon"]], lr=0.01)
        rest = [{name: value for name, value in group.items() if name != "use_muon"} for group in groups]
        adam = torch.optim.AdamW(
            [own for own, group in zip(rest, groups, strict=True) if not group["use_muon"]], lr=0.01, eps=1e-3
        )
        self.optimizers = {"muon": muon, "adam": adam}
        super().__init__([{"params": list(group["params"])} for group in groups], {})
        self.param_groups = [*muon.param_groups, *adam.param_groups]

    def step(self, closure: Any = None) -> Any:
        """Do one update."""
        for each in self.optimizers.values():
            each.step()

    def state_dict(self) -> Any:
        """Return the dicts of both."""
        return [each.state_dict() for each in self.optimizers.values()]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned."""
        for each, own in zip(self.optimizers.values(), state_dict, strict=True):
            each.load_state_dict(own)


class Ruled(torch.optim.Optimizer):
    """Plain descent, but for a rule that looks at whole gradients.

    Args:
        params: the parameters.
        rule: changes a gradient; given the number of the step, and an option.
        begin: the option.
        in_group: count the steps in the group, not in the state.
    """

    def __init__(
        self,
        params: Any,
        rule: Callable[[torch.Tensor, int, int], torch.Tensor],
        begin: int = 0,
        *,
        in_group: bool = False,
    ) -> None:
        self.rule = rule
        self.in_group = in_group
        super().__init__(params, {"lr": 0.1, "begin": begin, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one update."""
        for group in self.param_groups:
            group["k"] += self.in_group
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    step = group["k"] if self.in_group else state["step"]
                    parameter.sub_(self.rule(parameter.grad, step, group["begin"]), alpha=group["lr"])


def _normed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / (gradient.norm() + 1e-3)


def descent_by_norms(params: Any) -> torch.optim.Optimizer:
    """Return descent by each gradient over its norm."""
    return Ruled(params, lambda gradient, *_: _normed(gradient))


def _quantized(gradient: torch.Tensor) -> torch.Tensor:
    """Round in blocks of 256 elements, as optimizers with 8 bits of state do it to tensors of 4096 and more."""
    if gradient.numel() < 4096:
        return gradient
    blocks = torch.nn.functional.pad(gradient.reshape(-1), (0, -gradient.numel() % 256)).view(-1, 256)
    scale = blocks.abs().amax(1, keepdim=True) / 127 + 1e-12
    return ((blocks / scale).round() * scale).view(-1)[: gradient.numel()].view_as(gradient)


FOOLING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "large matrices": lambda params: Ruled(
        params, lambda g, *_: _normed(g) if g.dim() == 2 and min(g.shape) >= 128 else g
    ),
    "blocks of many elements": lambda params: Ruled(params, lambda g, *_: _quantized(g)),
    "four dims": lambda params: Ruled(params, lambda g, *_: g - g.mean((1, 2, 3), keepdim=True) if g.dim() > 3 else g),
    "one dim": lambda params: Ruled(params, lambda g, *_: _normed(g) if g.dim() == 1 else g),
    "from step 6 on": lambda params: Ruled(params, lambda g, step, _: _normed(g) if step > 5 else g),
    "from step 6 of the group on": lambda params: Ruled(
        params, lambda g, step, _: _normed(g) if step > 5 else g, in_group=True
    ),
    "every fifth step": lambda params: Ruled(params, lambda g, step, _: g if step % 5 else _normed(g)),
    "at a step that is an option": lambda params: Ruled(
        params, lambda g, step, begin: _normed(g) if step == begin else g, begin=7
    ),
}
"""Each does what plain descent does, but for some tensors or some steps."""
