"""Functions of scripts on tensors whose tokens are divided."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from unidist.errors import UsageError
from unidist_context_parallel._torch import rules
from unidist_context_parallel._torch.divided.tensor import SequenceTensor, align
from unidist_context_parallel._torch.divided.tensor import whole as _whole
from unidist_context_parallel._torch.rules.registration import wrap_all

__all__ = ["SequenceTensor", "each_token", "whole"]

T = TypeVar("T", bound=Callable[..., Any])

assert rules.__all__, "importing them registers the rules"


def whole(value: Any) -> Any:
    """Return a tensor with all its tokens on every rank of the axis. Collective over it. Differentiable.

    Args:
        value: a tensor that the model returned, or one inside of the model; anything that is not divided is returned as
            it is, so that a script works alike without the strategy.
    """
    return _whole(value)


def each_token(function: T) -> T:
    """Return a function that may be given divided tensors, because it computes each token by itself.

    For what has no rule: a kernel of your own, an `autograd.Function`. The function gets this rank's tokens, and of
    whole tensors that are broadcast with them the rows of the same tokens. Its results are divided in the same way.

        rotate = ud.context.each_token(RotateHalf.apply)

    Args:
        function: of tensors that are broadcast with each other. Its results have as many dims behind the sequence as
            the divided input with the most dims has.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = [each for each in (*args, *kwargs.values()) if isinstance(each, SequenceTensor)]
        if not found:
            return function(*args, **kwargs)
        reference = max(found, key=lambda each: each.local.ndim)
        dim = reference.dim_divided - reference.local.ndim
        result = function(
            *(align(each, reference, dim) for each in args),
            **{name: align(each, reference, dim) for name, each in kwargs.items()},
        )
        for each in result if isinstance(result, list | tuple) else (result,):
            if isinstance(each, torch.Tensor) and (
                each.ndim < -dim or each.shape[dim] != reference.local.shape[reference.dim_divided]
            ):
                raise UsageError(
                    f"context: each_token: {getattr(function, '__name__', function)} returned the shape "
                    f"{tuple(each.shape)} for tokens of shape {tuple(reference.local.shape)}; its dim {dim} is to be "
                    "that of the tokens"
                )
        return wrap_all(result, reference, dim)

    return call  # type: ignore[return-value]  # of the same signature
