"""A backward pass in two parts gives the gradients of one, and computes nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - after importorskip

from unidist_pipeline._torch.backward import SplitBackward, backward  # noqa: E402 - after importorskip
from unidist_pipeline._torch.gradient_sums import GradientSums  # noqa: E402 - after importorskip


class Counting(torch.nn.Module):
    """A block with a residual, a norm, an affine scale, a layer used twice, and a value of weights only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.twice = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
        self.up, self.down = torch.nn.Linear(4, 9), torch.nn.Linear(9, 4, bias=False)
        self.scale = torch.nn.Parameter(torch.linspace(1, 2, 4))
        self.unused = torch.nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, left: Any, right: Any) -> Any:
        hidden = self.twice(self.norm(left)) * self.scale + right
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        parts = self.twice(hidden).chunk(2, dim=1)
        return hidden, parts[1], self.scale * 2


class Once(GradientSums):
    """Gradients of one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, Any] = {}

    def add(self, parameter: Any, gradient: Any) -> None:
        assert parameter not in self.found, "a weight gets its gradient once"
        self.found[parameter] = gradient

    def add_product(self, parameter: Any, left: Any, right: Any) -> None:
        self.add(parameter, (left @ right).detach())


def both(block: Any, inputs: Any, gradients: Any) -> tuple[Any, Any]:
    weights = list(block.parameters())
    sums = Once()
    expected = backward(block(*inputs), gradients, inputs, weights, sums)
    whole = sums.found
    sums = Once()
    parts = SplitBackward(block(*inputs), gradients, inputs, weights)
    found = parts.input(sums)
    early = set(sums.found)
    parts.weight(sums)
    split = sums.found
    assert split.keys() == whole.keys()
    for weight, gradient in whole.items():
        torch.testing.assert_close(split[weight], gradient, rtol=0, atol=1e-14)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    return early, split


def test_two_parts_give_the_gradients_of_one() -> None:
    torch.manual_seed(0)
    block = Counting()
    inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gradients = [torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64), torch.ones(4).double()]
    early, split = both(block, inputs, gradients)
    assert early == {block.twice.weight, block.twice.bias, block.scale}, "what is used in several places"
    assert block.unused not in split


def test_a_stage_that_has_received_nothing_computes_all_in_the_second_part() -> None:
    block = torch.nn.Linear(4, 4)
    parts = SplitBackward([block(torch.ones(2, 4))], [torch.ones(2, 4)], [], list(block.parameters()))
    sums = Once()
    assert parts.input(sums) == []
    assert not sums.found
    parts.weight(sums)
    assert set(sums.found) == set(block.parameters())


def test_nothing_is_computed_twice() -> None:
    counts = {"input": 0, "weight": 0}

    class Noting(TorchDispatchMode):
        def __init__(self, part: str) -> None:
            super().__init__()
            self.part = part

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[self.part] += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    block = torch.nn.Sequential(*(layer for _ in range(5) for layer in (torch.nn.Linear(4, 4), torch.nn.Tanh())))
    inputs = [torch.ones(2, 4, requires_grad=True)]
    parts = SplitBackward([block(*inputs)], [torch.ones(2, 4)], inputs, list(block.parameters()))
    sums = Once()
    with Noting("input"):
        parts.input(sums)
    with Noting("weight"):
        parts.weight(sums)
    assert counts == {"input": 5, "weight": 5}
