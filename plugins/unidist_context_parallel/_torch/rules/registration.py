"""Registration of rules, and helpers that many of them need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist_context_parallel._torch.divided.tensor import RULES, Rule, SequenceTensor, check_followed


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations of these names, and for their in-place forms where these are named too."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def divided(value: Any) -> SequenceTensor | None:
    """Return a value that is a divided tensor, checked; else None."""
    if isinstance(value, SequenceTensor):
        check_followed(value)
        return value
    return None


def wrapped_dim(dim: int, ndim: int) -> int:
    """Return a dim counted from 0.

    Raises:
        IndexError: it is out of range.
    """
    if not -max(1, ndim) <= dim < max(1, ndim):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % max(1, ndim)


def wrap_all(result: Any, reference: SequenceTensor, dim_from_end: int) -> Any:
    """Return results of an operation on local rows as divided tensors; lists and tuples of them too."""
    if isinstance(result, torch.Tensor):
        return reference.like(result, result.ndim + dim_from_end)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(wrap_all(each, reference, dim_from_end) for each in result))
    if isinstance(result, tuple) and type(result).__module__ == "torch.return_types":
        return type(result)([wrap_all(each, reference, dim_from_end) for each in result])
    if isinstance(result, list | tuple):
        return type(result)(wrap_all(each, reference, dim_from_end) for each in result)
    return result


def parameters_of(names: str, defaults: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call in the order of `names`, which are separated by spaces.

    Raises:
        TypeError: there is one too many.
    """
    order = names.split()
    if len(args) > len(order):
        raise TypeError(f"{len(args)} arguments for {names!r}")
    given = dict(zip(order, args, strict=False)) | kwargs
    unknown = given.keys() - set(order)
    if unknown:
        raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
    return [given.get(name, defaults.get(name)) for name in order]
