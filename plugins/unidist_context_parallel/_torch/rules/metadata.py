"""Questions about a tensor, its moves and its gradients, and what ends in plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist_context_parallel._torch.divided.tensor import SequenceTensor, check_followed, name_of, refuse, whole
from unidist_context_parallel._torch.rules.registration import divided, rule


@rule(
    "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "get_device", "ndimension",
    "get shape", "get ndim", "get dtype", "get device", "get layout", "get is_cuda", "get is_cpu", "get is_meta",
    "get is_sparse", "get is_quantized", "get is_nested", "get is_mkldnn", "get is_mps", "get is_xpu", "get names",
    "get itemsize", "get nbytes", "is_same_size", "__hash__", "get _version", "is_conj", "is_neg", "is_inference",
    "stride", "has_names", "is_signed", "get is_sparse_csr", "get is_vulkan", "get is_hpu", "get is_ipu",
)  # fmt: skip
def _of_the_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@rule("is_contiguous", "get requires_grad", "get is_leaf", "get grad_fn")
def _of_the_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if name_of(func) == "get grad_fn":
        check_followed(tensor)
    return func(tensor.local, *args[1:], **kwargs)


@rule("requires_grad_", "retain_grad", "set requires_grad")
def _marked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func(args[0].local, *args[1:], **kwargs)
    return args[0]


@rule("get grad")
def _gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient = args[0].local.grad
    return None if gradient is None else args[0].like(gradient)


@rule("get T", "get mT", "get H", "get mH")
def _turned(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.local.ndim < 2:
        return tensor
    if name_of(func) in ("get mT", "get mH"):
        return tensor.transpose(-2, -1)
    return tensor.permute(*reversed(range(tensor.local.ndim)))


@rule("get data", "get real")
def _data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(func(args[0].local))


@rule("tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__", "is_nonzero",
      "__complex__", "__contains__")  # fmt: skip
def _numbers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*map(whole, args), **kwargs)


@rule("backward")
def _backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse(func, "begins at a divided tensor; a loss is a scalar, the mean or sum over all tokens")


@rule("register_hook", "register_post_accumulate_grad_hook")
def _hooked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, hook = args

    def on_rows(gradient: torch.Tensor) -> Any:
        found = hook(tensor.like(gradient))
        return found.local if isinstance(found, SequenceTensor) else found

    return tensor.local.register_hook(on_rows)


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def _new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = divided(args[0])
    return func(args[0] if tensor is None else tensor.local, *args[1:], **kwargs)


@rule("result_type", "can_cast", "promote_types", "_has_compatible_shallow_copy_type")
def _of_types(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*(each.local if isinstance(each, SequenceTensor) else each for each in args), **kwargs)
