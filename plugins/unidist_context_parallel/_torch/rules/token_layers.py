"""Layers that compute each token, or each sample, by itself; and those that mix tokens, which are refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist_context_parallel._torch.divided.tensor import SequenceTensor, align, name_of, refuse, whole
from unidist_context_parallel._torch.rules.registration import divided, parameters_of, rule


@rule("embedding")
def _embedding(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    if func is torch.embedding or name_of(func) != getattr(func, "__name__", ""):
        names = "weight input padding_idx scale_grad_by_freq sparse"
    given = dict(zip(names.split(), args, strict=False)) | kwargs
    if given.get("max_norm") is not None:
        refuse(func, "has max_norm, with which the tokens of this rank alone would change the table")
    if given.get("scale_grad_by_freq"):
        refuse(func, "has scale_grad_by_freq, and this rank counts its own tokens only")
    tokens = divided(given["input"])
    weight = whole(given["weight"])
    options = {key: given[key] for key in ("padding_idx", "sparse") if given.get(key) is not None}
    if options.get("padding_idx", 0) < 0 and names.startswith("weight"):
        del options["padding_idx"]
    if tokens is None:
        return F.embedding(given["input"], weight, **options)
    return tokens.like(F.embedding(tokens.local, weight, **options))


@rule("layer_norm", "rms_norm", "native_layer_norm")
def _norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "normalized_shape"), args, strict=False)) | kwargs
    tensor = divided(given["input"])
    if tensor is None or tensor.dim_divided >= tensor.local.ndim - len(given["normalized_shape"]):
        refuse(func, "normalizes over the sequence")
    rest = {key: value for key, value in kwargs.items() if key != "input"}
    result = func(tensor.local, *args[1:], **rest)
    return tuple(map(tensor.like, result)) if isinstance(result, tuple) else tensor.like(result)


@rule("group_norm", "instance_norm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
      "conv_transpose3d", "convolution", "conv_tbc", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
      "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
      "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "interpolate", "pixel_shuffle",
      "pixel_unshuffle", "local_response_norm", "fold", "im2col", "grid_sample", "lp_pool1d", "lp_pool2d")  # fmt: skip
def _by_sample(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = divided(args[0])
    if tensor is None or tensor.dim_divided:
        refuse(func, "mixes tokens of the sequence")
    result = func(tensor.local, *args[1:], **kwargs)
    return tuple(map(tensor.like, result)) if isinstance(result, tuple) else tensor.like(result)


@rule("batch_norm")
def _batch_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = "input running_mean running_var weight bias training momentum eps"
    if func is not F.batch_norm:
        names = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
    given = dict(zip(names.split(), args, strict=False)) | kwargs
    tensor = divided(given["input"])
    if tensor is None or given.get("training") or given.get("running_mean") is None or tensor.dim_divided == 1:
        refuse(func, "takes statistics over the tokens of the sequence")
    return tensor.like(func(tensor.local, *args[1:], **kwargs))


@rule("prelu", "_prelu_kernel")
def _prelu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, weight = parameters_of("input weight", {}, args, kwargs)
    if weight.numel() > 1 and tensor.dim_divided == 1:
        return tensor.like(func(tensor.local, align(weight, tensor, -1)))
    return tensor.like(func(tensor.local, weight))


@rule("one_hot")
def _one_hot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, classes = parameters_of("input num_classes", {"num_classes": -1}, args, kwargs)
    if classes < 0:
        classes = int(tensor.full_tensor().max()) + 1
    return tensor.like(F.one_hot(tensor.local, classes))


@rule("multi_head_attention_forward", "gumbel_softmax", "cosine_similarity_")
def _followed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch.nn.functional that is written in Python: its own operations are intercepted."""
    return _with_plain_checks(func)(*args, **kwargs)


def _with_plain_checks(func: Any) -> Callable[..., Any]:
    """Return the function, which does not ask whether to be intercepted as one."""
    name = name_of(func)
    if name not in _bodies:
        names = dict(func.__globals__)
        for check in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            names[check] = lambda *args: False
        body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
        body.__kwdefaults__ = func.__kwdefaults__
        _bodies[name] = body
    return _bodies[name]


_bodies: dict[str, Callable[..., Any]] = {}


@rule("cosine_similarity", "pairwise_distance")
def _similarity(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first, second = args[:2]
    reference = next(each for each in (first, second) if isinstance(each, SequenceTensor))
    ndim = reference.local.ndim
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 1) if name_of(func) == "cosine_similarity" else ndim - 1
    if dim % ndim == reference.dim_divided or len(first.shape) != len(second.shape):
        refuse(func, "compares along the sequence")
    at = reference.dim_divided - ndim
    result = func(align(first, reference, at), align(second, reference, at), *args[2:], **kwargs)
    return reference.like(result, reference.dim_divided - (dim % ndim < reference.dim_divided))
