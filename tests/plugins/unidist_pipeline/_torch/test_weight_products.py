"""Gradients that are products are added up by the products, and are those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402 - after importorskip

from unidist_pipeline._torch.backward import SplitBackward, backward  # noqa: E402 - after importorskip
from unidist_pipeline._torch.gradient_sums import GradientSums  # noqa: E402 - after importorskip

F = torch.nn.functional
ROWS, WIDTH = 3, 4
Make = Callable[..., Any]
"""Takes the received tensor and two weights; returns what the stage has made."""


class Noting(GradientSums):
    """Notes which weights get products."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[Any] = set()

    def add_product(self, parameter: Any, left: Any, right: Any) -> None:
        self.products.add(parameter)
        super().add_product(parameter, left, right)


def whole(roots: Any, gradients: Any, inputs: Any, weights: Any, sums: GradientSums) -> Any:
    return backward(roots, gradients, inputs, weights, sums)


def in_two_parts(roots: Any, gradients: Any, inputs: Any, weights: Any, sums: GradientSums) -> Any:
    parts = SplitBackward(roots, gradients, inputs, weights)
    found = parts.input(sums)
    parts.weight(sums)
    return found


def products_of(make: Make, run: Any = whole, *, receives: bool = True, num_microbatches: int = 3) -> tuple[bool, bool]:
    """Say for which of the two weights the gradients were products; all gradients must be those of autograd."""
    torch.manual_seed(0)
    w, v = (torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sums = Noting()
    expected = [torch.zeros_like(each) for each in (w, v)]
    for _ in range(num_microbatches):
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=receives)
        inputs = [x] if receives else []

        def roots(x: Any = x) -> list[Any]:
            made = make(x, w, v)
            return list(made) if isinstance(made, tuple) else [made]

        gradients = [torch.randn_like(each) for each in roots()]
        found = run(roots(), gradients, inputs, [w, v], sums)
        wanted = torch.autograd.grad(roots(), [*inputs, w, v], gradients, allow_unused=True)
        for one, other in zip(found, wanted, strict=False):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        for total, each in zip(expected, wanted[len(inputs) :], strict=True):
            if each is not None:
                total += each
    noted = sums.products
    for weight, total in zip((w, v), expected, strict=True):
        got = sums.pop(weight)
        torch.testing.assert_close(torch.zeros_like(weight) if got is None else got, total, rtol=0, atol=1e-12)
    return w in noted, v in noted


def doubled(gradient: Any) -> Any:
    return gradient * 2


def hooked(x: Any, w: Any, v: Any) -> Any:
    if not w._backward_hooks:
        w.register_hook(doubled)
    return F.linear(torch.tanh(F.linear(x, w)), v)


def output_hooked(x: Any, w: Any, v: Any) -> Any:
    made = F.linear(x, w)
    made.register_hook(doubled)
    return F.linear(torch.tanh(made), v)


def recomputed(x: Any, w: Any, v: Any) -> Any:
    return checkpoint(lambda x: torch.tanh(F.linear(x, w)), x, use_reentrant=False) @ v


def moved_elsewhere(x: Any, w: Any, v: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        made = torch.tanh(F.linear(x, w))
    return made @ v


BIAS = torch.ones(WIDTH, dtype=torch.float64)
CONSTANT = torch.linspace(0, 1, ROWS * WIDTH, dtype=torch.float64).reshape(ROWS, WIDTH)
USES: dict[str, tuple[Make, tuple[bool, bool]]] = {
    "linear layers": (lambda x, w, v: F.linear(torch.tanh(F.linear(x, w)), v, BIAS), (True, True)),
    "of three dims": (lambda x, w, v: F.linear(torch.tanh(F.linear(x[None], w)), v, BIAS), (True, True)),
    "not transposed": (lambda x, w, v: torch.addmm(BIAS, torch.tanh(x @ w), v), (True, True)),
    "scaled": (lambda x, w, v: torch.addmm(BIAS, torch.tanh(x @ w), v, beta=3, alpha=2), (True, False)),
    "on the left": (lambda x, w, v: torch.tanh(w @ x.t()).t() @ v, (False, True)),
    "used twice": (lambda x, w, v: F.linear(torch.tanh(F.linear(x, w)), w) @ v, (False, True)),
    "transposed once, used twice": (lambda x, w, v: (lambda t: torch.tanh(x @ t) @ t @ v)(w.t()), (False, True)),
    "and passed on": (lambda x, w, v: (F.linear(x, w) @ v, w), (False, True)),
    "and passed on transposed": (lambda x, w, v: (lambda t: (x @ t @ v, t))(w.t()), (False, True)),
    "of a constant": (lambda x, w, v: torch.tanh(F.linear(CONSTANT, w)) * F.linear(x, v), (False, True)),
    "in no way": (lambda x, w, v: F.linear(x, v), (False, True)),
    "elementwise": (lambda x, w, v: F.linear(x, v) * w.sum(), (False, True)),
    "its result in two places": (lambda x, w, v: (lambda y: (y, torch.tanh(y) @ v))(F.linear(x, w)), (True, True)),
    "with a hook": (hooked, (False, True)),
    "with a hook on the result": (output_hooked, (True, True)),
    "recomputed": (recomputed, (False, True)),
    "with x moved elsewhere": (moved_elsewhere, (False, True)),
}


@pytest.mark.parametrize("run", [whole, in_two_parts])
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_autograd(use: str, run: Any) -> None:
    make, expected = USES[use]
    assert products_of(make, run) == expected


@pytest.mark.parametrize("run", [whole, in_two_parts])
def test_an_operation_below_which_nothing_is_asked_for_is_left_to_autograd(run: Any) -> None:
    """It would not run."""
    assert products_of(USES["linear layers"][0], run, receives=False) == (False, True)


def test_sums_take_gradients_of_every_kind_in_any_order() -> None:
    """An embedding that is a linear layer too, whose gradients are sparse or dense."""
    weight = torch.zeros(4, 2)
    left, right = torch.ones(4, 3), torch.ones(3, 2)
    sparse = torch.ones(4, 2).to_sparse()
    adders: dict[str, Callable[[GradientSums], None]] = {
        "product": lambda sums: sums.add_product(weight, left, right),
        "sparse factor": lambda sums: sums.add_product(weight, left.to_sparse(), right),
        "dense": lambda sums: sums.add(weight, torch.full((4, 2), 3.0)),
        "sparse": lambda sums: sums.add(weight, sparse * 3),
    }
    for first in adders.values():
        for second in adders.values():
            for third in adders.values():
                sums = GradientSums()
                for add in (first, second, third):
                    add(sums)
                total = sums.pop(weight)
                assert total is not None
                assert total.to_dense().tolist() == [[9.0, 9.0]] * 4
                assert sums.pop(weight) is None


def test_a_gradient_of_autograds_is_not_changed() -> None:
    """It may be the gradient of something else too."""
    weight, gradient = torch.zeros(4, 2), torch.ones(4, 2)
    sums = GradientSums()
    sums.add(weight, gradient)
    sums.add_product(weight, torch.ones(4, 3), torch.ones(3, 2))
    sums.add(weight, gradient)
    assert gradient.eq(1).all()
    total = sums.pop(weight)
    assert total is not None
    assert total.eq(5).all()


@pytest.mark.parametrize("kinds", ["products", "gradients"])
def test_sums_are_made_where_they_are_wanted(kinds: str) -> None:
    weight, place = torch.zeros(4, 2), torch.full((2, 4), float("nan")).t()
    sums = GradientSums(lambda parameter: place if parameter is weight else None)
    for _ in range(3):
        if kinds == "products":
            sums.add_product(weight, torch.ones(4, 3), torch.ones(3, 2))
        else:
            sums.add(weight, torch.full((4, 2), 3.0))
    total = sums.pop(weight)
    assert total is place
    assert place.eq(9).all()
