"""Losses that count as much as their weights say: `weighted`, and the weights of `TrainStep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from unidist.errors import UsageError
from unidist.optim.update import Update, update_of
from unidist.training.weighted_loss import WeightedPass, weighted_update
from unidist_torch.host_copies import HostCopy
from unidist_torch.operations.differentiable import check_once

__all__ = ["loss_of_nothing", "number_of", "weighted"]


def weighted(loss: torch.Tensor, weight: Any, *, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """Return a loss whose gradients count as much as its weight: a mean over all ranks' tokens, not of ranks' means.

        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss = ud.weighted(loss, (y != -100).sum())
        loss.backward()

    The gradient of the update is that of sum(losses) / sum(weights) over all ranks and over all backward passes before
    it: those of `accumulate=N`, or those that the script adds up itself, without dividing by their number. Collective:
    one exchange of a number, for which the host waits. Without gradients (`torch.no_grad()`) it returns the value
    alone.

    Args:
        loss: of this rank's batch, a scalar: the sum of its losses, divided by the weight.
        weight: by what it was divided, a number or a tensor with one element: the tokens that count. 0: nothing of this
            batch does, and the loss does not matter, but its backward pass has to be finite (PyTorch's losses are; a
            division by a count of your own needs `count.clamp(min=1)`).
        optimizer: whose gradients these are; default: the only one that is distributed.

    Returns:
        A scalar whose mean over the ranks is the mean over the tokens of all ranks in this pass; 0 if there are none.

    Raises:
        UsageError: on all ranks: a weight is negative or not finite. There is no distributed optimizer, or there are
            several; several passes make an update, and one of them adds up losses with different weights.
    """
    update = weighted_update(optimizer, update_of)
    result: torch.Tensor = _Weighted.apply(loss, WeightedPass.of(update, number_of(weight)), update)
    return result


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, weight: WeightedPass, update: Update) -> torch.Tensor:
        ctx.weight, ctx.update = weight, update
        return loss * weight.of_value if weight.share else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        check_once("ud.weighted")
        return gradients[0] * ctx.weight.of_gradients(ctx.update), None, None


def number_of(weight: Any) -> float | Callable[[], float]:
    """Return a weight as a number, or a function that waits for it if it is on a device.

    Raises:
        UsageError: it is no scalar.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise UsageError(
                f"the weight of a loss is a tensor of shape {list(weight.shape)}. It is one number for the batch: by "
                "what its loss is divided, say (y != -100).sum()"
            )
        if not weight.is_cpu:
            copied = HostCopy(weight.detach())
            return lambda: float(copied.wait())
    return float(weight)


def loss_of_nothing(outputs: Any) -> torch.Tensor | None:
    """Return a loss of 0 that lets every output have a gradient of zeros; None: no tensor is found in the outputs.

    For a batch in which nothing counts: the loss function may divide by 0.
    """
    tensors = [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor)]
    trained = [each for each in tensors if each.requires_grad] or tensors[:1]
    return torch.stack([(each * 0).sum() for each in trained]).sum() if trained else None
