"""Batch normalisation over the samples of all ranks, by Horovod's name; on CPU and GPU.

Forward, every rank contributes count, mean and sum of squared deviations of its samples, which are combined as in Chan,
Golub, LeVeque 1979 ("Updating formulae and a pairwise algorithm for computing sample variances"), in float64; every
rank computes them from the same gathered numbers, so the running statistics are the same bits everywhere. Backward,
the two sums over samples in the gradient of the input are added up over the ranks. The gradients of weight and bias
are this rank's own: `DistributedOptimizer` reduces them like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_torch.memory import refuse_transformed
from unidist_torch.operations import Sum, allgather, allreduce_
from unidist_torch.operations.differentiable import check_once


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm1d, 2d or 3d whose statistics in training are those of the samples of all ranks.

    Every rank runs it equally often, forward and backward, on batches that may differ in size or be empty. In `eval` it
    is local. `SyncBatchNorm.convert(model)` replaces every batch normalisation of a model.

    Args:
        num_features: channels C of inputs `(N, C, ...)`.
        eps: added to the variance.
        momentum: of the running statistics; None for their plain mean over all batches.
        affine: have weight and bias.
        track_running_stats: keep running statistics; without, `eval` uses those of the batch, over all ranks.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert(cls, module: torch.nn.Module, *, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
        """Return the model with a SyncBatchNorm, of the same parameters and buffers, in place of every batch norm."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set=process_set,
            )
            made.weight, made.bias = module.weight, module.bias
            made.running_mean, made.running_var = module.running_mean, module.running_var
            made.num_batches_tracked = module.num_batches_tracked
            made.training = module.training
            return made
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child, process_set=process_set))
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dims (N, C, ...), got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `(N, C, ...)`; collective if statistics of the batch are used."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or self._num_ranks() == 1:
            return self._local(input)
        factor = 0.0
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        running = (self.running_mean, self.running_var) if factor else (None, None)
        refuse_transformed()
        return _Normalise.apply(input, self.weight, self.bias, *running, factor, self.eps, self.process_set)

    def _local(self, input: torch.Tensor) -> torch.Tensor:
        plain: Any = torch.nn.modules.batchnorm._BatchNorm.forward
        return plain(self, input)

    def _num_ranks(self) -> int:
        if not context.is_initialized():
            return 1
        return len(self.process_set.ranks) if self.process_set.included() else 1


class _Normalise(torch.autograd.Function):
    """The normalisation itself. Shapes: samples and places flattened, N x C x ..."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        factor: float,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        # 16-bit numbers are summed in float32, as torch does.
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        count, mean, squares = _combine(*_statistics(wide), process_set)
        variance = squares / count.clamp(min=1)
        if running_mean is not None and running_var is not None and count > 0:
            unbiased = squares / (count - 1).clamp(min=1)
            running_mean.lerp_(mean.to(running_mean), factor)
            running_var.lerp_(unbiased.to(running_var), factor)
        scale = torch.rsqrt(variance + eps).to(wide)
        normal = (wide - _channels(mean.to(wide), wide)) * _channels(scale, wide)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.process_set, ctx.dtype, ctx.has_bias = process_set, values.dtype, bias is not None
        result = normal if weight is None else normal * _channels(weight.to(normal), normal)
        result = result if bias is None else result + _channels(bias.to(result), result)
        return result.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_once("SyncBatchNorm")
        normal, weight, scale, count = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        over = [dim for dim in range(wide.dim()) if dim != 1]
        sum_gradient, sum_product = wide.sum(over), (wide * normal).sum(over)
        grad_weight = sum_product.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        grad_bias = sum_gradient.to(ctx.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        grad_values = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_gradient, sum_product]).to(torch.float64)
            name = f"sync_batch_norm.backward.{sums.shape[1]}"
            sums = allreduce_(sums, name=name, op=Sum, process_set=ctx.process_set) / count.clamp(min=1)
            means = sums.to(wide)
            grad_values = wide - _channels(means[0], wide) - normal * _channels(means[1], wide)
            grad_values *= _channels(scale if weight is None else scale * weight.to(scale), wide)
            grad_values = grad_values.to(ctx.dtype)
        return grad_values, grad_weight, grad_bias, None, None, None, None, None


def _statistics(values: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return count, mean `(C,)` and sum of squared deviations `(C,)` of this rank's values; zeros without any."""
    over = [dim for dim in range(values.dim()) if dim != 1]
    count = values.numel() // max(1, values.shape[1])
    if not count:
        zeros = torch.zeros(values.shape[1], dtype=values.dtype, device=values.device)
        return 0, zeros, zeros
    variance, mean = torch.var_mean(values, over, correction=0)
    return count, mean, variance * count


def _combine(
    count: int, mean: torch.Tensor, squares: torch.Tensor, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, mean and squared deviations of all ranks' values, in float64."""
    own = torch.cat([mean.new_tensor([count], dtype=torch.float64), mean.double(), squares.double()])
    # The name tells widths apart, so that each is agreed on once.
    everyone = allgather(own[None], name=f"sync_batch_norm.forward.{mean.numel()}", process_set=process_set)
    counts, means, parts = everyone[:, :1], everyone[:, 1 : 1 + mean.numel()], everyone[:, 1 + mean.numel() :]
    total = counts.sum()
    overall = (counts * means).sum(0) / total.clamp(min=1)
    return total, overall, (parts + counts * (means - overall).square()).sum(0)


def _channels(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `(C,)` in a shape that broadcasts over `(N, C, ...)`."""
    return vector.reshape(1, -1, *([1] * (like.dim() - 2)))
