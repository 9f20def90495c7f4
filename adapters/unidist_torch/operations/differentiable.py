"""Operations on tensors as autograd functions: one operation forward, and one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist.errors import UsageError
from unidist_torch.memory import refuse_transformed

__all__ = ["apply", "apply_group", "apply_pair", "check_once", "inside", "needs_gradients"]

Run = Callable[..., Any]


def needs_gradients(*tensors: torch.Tensor) -> bool:
    """Return whether gradients must flow through an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def inside(tensor: torch.Tensor, function: Run) -> torch.Tensor:
    """Return `function(tensor)`, computed on the tensor inside if it is a subclass that wraps one.

    Such a subclass has `__tensor_flatten__` and `__tensor_unflatten__`, see `torch.utils._python_dispatch`. For
    functions that do the same to every element, so that what the wrapper stands for does not matter.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        plain: torch.Tensor = function(tensor)
        return plain
    wrapper: Any = tensor
    (name,), meta = wrapper.__tensor_flatten__()
    wrapped: torch.Tensor = type(wrapper).__tensor_unflatten__(
        {name: function(getattr(wrapper, name))}, meta, None, None
    )
    return wrapped


def apply(tensor: torch.Tensor, run: Run, backward: Run) -> torch.Tensor:
    """Return `run(tensor)`; its gradient is `backward(gradient of the result)`.

    Every rank runs backward through it too: the backward operation is collective as well.

    Args:
        tensor: the tensor.
        run: returns a new tensor.
        backward: the same of gradients. If it is to have a gradient itself, it is made of what autograd knows.
    """
    return apply_group([tensor], lambda values: [run(values)], lambda gradient: [backward(gradient)])[0]


def apply_group(tensors: Sequence[torch.Tensor], run: Run, backward: Run) -> list[torch.Tensor]:
    """Return `run(*tensors)`, a list of as many tensors; their gradients are `backward(*gradients)`."""
    if not needs_gradients(*tensors):
        return list(run(*tensors))
    refuse_transformed()
    return list(_Operation.apply(run, backward, *tensors))


def apply_pair(tensor: torch.Tensor, run: Run, transpose: Run) -> torch.Tensor:
    """Return `run(tensor)`, where each of two linear functions is the gradient of the other, to any order.

    Args:
        tensor: the tensor.
        run: returns a new tensor, by what autograd need not know: operations of a communicator.
        transpose: the same of gradients.
    """
    return apply(tensor, run, lambda gradient: apply_pair(gradient, transpose, run))


def check_once(what: str) -> None:
    """Make sure that a gradient is not made to be differentiated; for what computes one that has none itself.

    To be called in `backward`. PyTorch's `once_differentiable` notices only what depends on the gradients that come in,
    and takes the rest for constants without a word.

    Args:
        what: has the gradient.

    Raises:
        UsageError: it was asked for with `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise UsageError(
            f"{what}: a gradient was asked for with create_graph=True, and has no gradient itself: a loss that is "
            "computed from it (a gradient penalty, a Hessian) would train wrongly. Compute it from layers that have one"
        )


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, backward: Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.backward_operation = backward
        return tuple(run(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = ctx.backward_operation(*(gradient.contiguous() for gradient in gradients))
        if any(each.requires_grad for each in gradients) and not all(each.requires_grad for each in found):
            check_once("an operation whose backward autograd does not know")
        return (None, None, *found)
