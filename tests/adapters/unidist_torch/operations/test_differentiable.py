"""Operations as autograd functions: what is no gradient of a gradient is never taken for a constant."""

from __future__ import annotations

import pytest
import torch

from unidist.errors import UsageError
from unidist_torch.operations.differentiable import apply, apply_pair


def outside(tensor: torch.Tensor) -> torch.Tensor:
    """Return the double by what autograd does not see, as an operation of a communicator."""
    return torch.from_numpy(2.0 * tensor.detach().numpy())


def penalty(made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
    return gradient.square().sum()


def test_the_gradient_of_a_pair_has_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    penalty(apply_pair(x, outside, outside), x).backward()  # the sum of (8 x)^2
    assert torch.equal(x.grad, torch.full((3,), 128.0))


def test_a_backward_that_autograd_does_not_know_is_an_error_where_it_needs_a_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    made = apply(x, outside, outside)
    with pytest.raises(UsageError, match="create_graph=True"):
        penalty(made, x)
    apply(x, outside, outside).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
