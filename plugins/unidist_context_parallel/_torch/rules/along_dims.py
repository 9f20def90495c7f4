"""Operations along dims: reductions, softmax, sorting. Along other dims than the divided one they are local.

Sums and means over the divided dim are completed by a sum over the ranks. What else needs all tokens gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist_context_parallel._torch.divided.axis import take_rows
from unidist_context_parallel._torch.divided.tensor import SequenceTensor, gathers, name_of, whole
from unidist_context_parallel._torch.rules.registration import divided, rule, wrap_all, wrapped_dim


@rule("sum", "nansum", "mean", "count_nonzero", "sum_to_size")
def _sums(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims, keeps = _reduction(args, kwargs)
    if tensor.dim_divided not in dims:
        return _local(func, tensor, args, kwargs, dims, keeps)
    name = name_of(func)
    local = func(tensor.local, *args[1:], **_without_input(kwargs)) if name != "mean" else None
    if local is None:
        dtype = kwargs.get("dtype", args[3] if len(args) > 3 else None)
        local = torch.sum(tensor.local, dims, keepdim=keeps, dtype=dtype)
    total = tensor.axis.summed(local)
    if name != "mean":
        return total
    count = 1
    for dim in dims:
        count *= tensor.shape[dim]
    return total / count


@rule("all", "any", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "std", "var", "std_mean", "var_mean",
      "logsumexp", "norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "median", "nanmedian", "mode", "aminmax",
      "nanmean", "quantile", "kthvalue", "softmax_", "logsumexp")  # fmt: skip
def _reduced(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    if name in ("max", "min") and isinstance(kwargs.get("other", args[1] if len(args) > 1 else None), torch.Tensor):
        from unidist_context_parallel._torch.rules.elementwise import elementwise

        return elementwise(func, args, kwargs)
    skip = 1 if name in ("norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "quantile", "kthvalue") else 0
    tensor, dims, keeps = _reduction(args, kwargs, skip=skip, number_is_option=name in ("std", "var"))
    if tensor.dim_divided not in dims:
        return _local(func, tensor, args, kwargs, dims, keeps)
    if tensor.local.is_floating_point():
        gathers(func, "needs all tokens at once", tensor.axis)
    return func(tensor.full_tensor(), *map(whole, args[1:]), **_without_input(kwargs))


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin",
      "logcumsumexp", "sort", "argsort", "topk", "glu", "diff", "msort", "normalize", "renorm", "cumsum_")  # fmt: skip
def _along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    names, default = _ALONG.get(name, ("input dim", -1))
    given = dict(zip(names.split(), args, strict=False)) | kwargs
    tensor = divided(given.get("input", given.get("self")))
    assert tensor is not None, "its other arguments are numbers"
    dim = given.get("dim", default)
    if dim is None:
        dim = 0 if tensor.local.ndim in (0, 1, 3) else 1  # softmax's implicit choice
    if wrapped_dim(dim, tensor.local.ndim) != tensor.dim_divided:
        result = func(tensor.local, *args[1:], **_without_input(kwargs))
        return wrap_all(result, tensor, tensor.dim_divided - tensor.local.ndim)
    if tensor.local.is_floating_point():
        gathers(func, "goes along the sequence", tensor.axis)
    result = func(tensor.full_tensor(), *args[1:], **_without_input(kwargs))
    if isinstance(result, torch.Tensor) and result.shape == tensor.shape:
        return tensor.like(take_rows(result, tensor.rows, tensor.dim_divided, tensor.axis.rank))
    return result


_ALONG = {
    "topk": ("input k dim", -1),
    "diff": ("input n dim", -1),
    "msort": ("input", 0),
    "normalize": ("input p dim", 1),
    "renorm": ("input p dim", None),
    "softmax": ("input dim", None),
    "log_softmax": ("input dim", None),
    "softmin": ("input dim", None),
}


@rule("bincount", "histc", "unique", "_unique2", "unique_consecutive", "nonzero", "argwhere", "searchsorted",
      "bucketize", "isin", "trace", "diagonal", "tril", "triu", "cov", "corrcoef", "logdet", "det", "cdist",
      "kron")  # fmt: skip
def _of_all(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = next(each for each in (*args, *kwargs.values()) if isinstance(each, SequenceTensor))
    if first.local.is_floating_point():
        gathers(func, "needs all tokens at once", first.axis)
    return func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})


def _reduction(
    args: Sequence[Any], kwargs: dict[str, Any], *, skip: int = 0, number_is_option: bool = False
) -> tuple[SequenceTensor, tuple[int, ...], bool]:
    """Return the input, the dims that are reduced, and whether they are kept."""
    values = list(args)
    tensor = divided(values[0] if values else kwargs.get("input", kwargs.get("self", kwargs.get("x"))))
    assert tensor is not None, "the other arguments are no tensors"
    rest = values[1 + skip :]
    dim = kwargs.get("dim", kwargs.get("axis"))
    if dim is None and rest:
        first = rest.pop(0)
        if isinstance(first, bool) and number_is_option:
            first = None
        dim = first
    keeps = bool(
        kwargs.get("keepdim", kwargs.get("keepdims", rest[0] if rest and isinstance(rest[0], bool) else False))
    )
    ndim = tensor.local.ndim
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return tensor, tuple(range(ndim)), keeps
    dims = [dim] if isinstance(dim, int) else list(dim)
    return tensor, tuple(sorted({wrapped_dim(each, ndim) for each in dims})), keeps


def _local(
    func: Callable[..., Any],
    tensor: SequenceTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: tuple[int, ...],
    keeps: bool,
) -> Any:
    result = func(tensor.local, *args[1:], **_without_input(kwargs))
    after = tensor.local.ndim - tensor.dim_divided - 1  # dims behind the divided one
    if not keeps:
        after -= sum(dim > tensor.dim_divided for dim in dims)
    return wrap_all(result, tensor, -1 - after)


def _without_input(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("input", "self", "x")}
