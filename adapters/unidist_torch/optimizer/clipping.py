"""Clipping by norm and by value: calls that work with every strategy."""

from __future__ import annotations

import torch

from unidist.errors import UsageError


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale down the gradients of the update if their norm over all ranks is above `max_norm`; returns the norm.

        loss.backward()
        ud.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    As `torch.nn.utils.clip_grad_norm_`, but it takes the optimizer, and finds its gradients with strategies that shard
    them as well. Collective: it completes the exchange, between `backward` and `step`. With accumulation, a pass that
    does not complete an update is left alone. A rank that has called `join` does not take part, which clipping sharded
    gradients needs: use the strategy clip_norm there.

    Args:
        optimizer: bound by `distribute` or `DistributedOptimizer`, or a plain one.
        max_norm: above 0.
        norm_type: order of the norm, above 0; `math.inf` for the largest absolute value.
        error_if_nonfinite: raise where the norm is not finite.

    Returns:
        The norm over all parameters before, a scalar, equal on every rank; 0 where no update is completed.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.
        UsageError: a limit or an order of 0 or below.
    """
    if not (max_norm > 0 and norm_type > 0):
        raise UsageError(f"max_norm={max_norm:g}, norm_type={norm_type:g}: give numbers above 0")
    binding = getattr(optimizer, "_unidist", None)
    if binding is None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    norm = torch.tensor(binding.clip_norm(float(max_norm), float(norm_type)), dtype=torch.float64)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped"
        )
    return norm


def clip_grad_value_(optimizer: torch.optim.Optimizer, clip_value: float) -> None:
    """Move each element of the update's gradients into [-clip_value, clip_value].

        loss.backward()
        ud.clip_grad_value_(optimizer, 0.5)
        optimizer.step()

    As `torch.nn.utils.clip_grad_value_`, but it takes the optimizer, and finds its gradients with strategies that shard
    them as well. Collective: it completes the exchange, between `backward` and `step`. With accumulation, a pass that
    does not complete an update is left alone.

    Args:
        optimizer: bound by `distribute` or `DistributedOptimizer`, or a plain one.
        clip_value: above 0.

    Raises:
        UsageError: a limit of 0 or below.
    """
    if not clip_value > 0:
        raise UsageError(f"clip_value={clip_value:g}: give a number above 0")
    binding = getattr(optimizer, "_unidist", None)
    if binding is None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
    else:
        binding.clip_value(float(clip_value))
