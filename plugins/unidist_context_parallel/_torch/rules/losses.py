"""Losses: this rank's part of the sum over all tokens, completed by a sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist_context_parallel._torch.divided.tensor import SequenceTensor, align, name_of, refuse, whole
from unidist_context_parallel._torch.rules.registration import divided, rule

_CROSS_ENTROPY = "input target weight size_average ignore_index reduce reduction label_smoothing"
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@rule("cross_entropy", "nll_loss", "cross_entropy_loss", "nll_loss_nd", "nll_loss2d")
def _cross_entropy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names, smoothing = _CROSS_ENTROPY, 0.0
    aten = func not in (F.cross_entropy, F.nll_loss)
    if aten:
        names = "input target weight reduction ignore_index label_smoothing"
    given = dict(zip(names.split(), args, strict=False)) | {
        ("input" if key == "self" else key): value for key, value in kwargs.items()
    }
    if given.get("size_average") is not None or given.get("reduce") is not None:
        refuse(func, "is given size_average or reduce, which PyTorch deprecates; use reduction")
    reduction = given.get("reduction", "mean")
    reduction = _REDUCTIONS.get(reduction, reduction)
    weight, ignored = whole(given.get("weight")), given.get("ignore_index", -100)
    smoothing = given.get("label_smoothing", 0.0)
    scores, target = given["input"], given["target"]
    is_log = name_of(func).startswith("nll_loss")
    tensor = divided(scores)
    if tensor is None:  # the targets alone are divided
        target = whole(target)
        rest = {"weight": weight, "ignore_index": ignored, "reduction": reduction}
        return (
            F.nll_loss(scores, target, **rest)
            if is_log
            else F.cross_entropy(scores, target, label_smoothing=smoothing, **rest)
        )
    classes = 1 if tensor.local.ndim > 1 else 0
    if tensor.dim_divided == classes:
        refuse(func, "has the sequence where the classes are; its input is (samples, classes, ...)")
    probabilities = target.is_floating_point()
    own = tensor.dim_divided - tensor.local.ndim
    if not probabilities and tensor.dim_divided < classes:
        own += 1  # targets have no dim of classes, which is behind the divided one
    labels = _rows_of_target(target, tensor, own)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignored}

    def losses(kind: str) -> torch.Tensor:
        if is_log:
            return F.nll_loss(tensor.local, labels, reduction=kind, **options)
        return F.cross_entropy(tensor.local, labels, reduction=kind, label_smoothing=smoothing, **options)

    if reduction == "none":
        found = losses("none")
        return tensor.like(found, tensor.dim_divided - (tensor.dim_divided > classes))
    total = losses("sum")
    if reduction == "sum":
        return tensor.axis.summed(total)
    if probabilities:
        count = tensor.axis.sum(total.new_tensor(labels.numel() / max(1, labels.shape[classes])))
        return tensor.axis.summed(total) / count
    kept = labels != ignored
    if weight is None:
        part = kept.sum().to(torch.float64)
    else:
        part = weight.detach()[labels.clamp(0, len(weight) - 1)].mul(kept).sum(dtype=torch.float64)
    return tensor.axis.summed(total) / tensor.axis.sum(part).to(total.dtype)


def _rows_of_target(target: Any, tensor: SequenceTensor, dim: int) -> torch.Tensor:
    rows: torch.Tensor = align(target, tensor, dim)
    return rows


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "soft_margin_loss",
      "binary_cross_entropy_with_logits", "poisson_nll_loss", "gaussian_nll_loss")  # fmt: skip
def _by_element(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    names = {
        "mse_loss": "input target size_average reduce reduction weight",
        "l1_loss": "input target size_average reduce reduction weight",
        "smooth_l1_loss": "input target size_average reduce reduction beta",
        "huber_loss": "input target reduction delta weight",
        "binary_cross_entropy": "input target weight size_average reduce reduction",
        "binary_cross_entropy_with_logits": "input target weight size_average reduce reduction pos_weight",
        "kl_div": "input target size_average reduce reduction log_target",
        "soft_margin_loss": "input target size_average reduce reduction",
        "poisson_nll_loss": "input target log_input full size_average eps reduce reduction",
        "gaussian_nll_loss": "input target var full eps reduction",
    }[name]
    if getattr(F, name, None) is not func:  # of torch.ops.aten, by position
        names = {
            "smooth_l1_loss": "input target reduction beta",
            "binary_cross_entropy": "input target weight reduction",
            "binary_cross_entropy_with_logits": "input target weight pos_weight reduction",
            "kl_div": "input target reduction",
        }.get(name, "input target reduction delta" if name == "huber_loss" else "input target reduction")
    given = dict(zip(names.split(), args, strict=False)) | kwargs
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        refuse(func, "is given size_average or reduce, which PyTorch deprecates; use reduction")
    reduction = given.pop("reduction", "mean")
    reduction = _REDUCTIONS.get(reduction, reduction)
    tensors = [each for each in given.values() if isinstance(each, SequenceTensor)]
    reference = max(tensors, key=lambda each: each.local.ndim)
    divided(reference)
    at = reference.dim_divided - reference.local.ndim
    local = {key: align(value, reference, at) for key, value in given.items()}
    function: Any = getattr(F, name)
    result = function(**local, reduction="none")
    losses = reference.like(result, result.ndim + at)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "mean":
        return total / losses.numel()
    return total / given["input"].shape[0] if reduction == "batchmean" else total
