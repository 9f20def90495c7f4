"""The layer in one process, beside a loop over tokens written here."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="the layer is for PyTorch")

import torch

from unidist.errors import UsageError
from unidist_expert_parallel.torch import MixtureOfExperts, auxiliary_loss

WIDTH, EXPERTS, TOKENS = 6, 5, 11


def layer(**options: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    options = {"hidden": 4, "dtype": torch.float64, **options}
    return MixtureOfExperts(WIDTH, EXPERTS, **options)


def tokens() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)


def one_by_one(made: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Return what the layer shall return, token by token."""
    scores = x @ made.router.weight.T
    taken = [0] * EXPERTS
    limit = math.inf
    if made.capacity_factor is not None:
        limit = max(1, math.ceil(made.capacity_factor * len(x) * made.top_k / EXPERTS))
    rows = [torch.zeros(WIDTH, dtype=x.dtype) for _ in x]
    for choice in range(made.top_k):
        for number, token in enumerate(x):
            probabilities = scores[number].exp() / scores[number].exp().sum()
            ranking = sorted(range(EXPERTS), key=lambda each: -float(scores[number][each].detach()))[: made.top_k]
            weights = probabilities[ranking]
            if made.softmax == "after" or made.normalize:
                weights = weights / weights.sum()
            expert = ranking[choice]
            if taken[expert] < limit:
                rows[number] = rows[number] + weights[choice] * output(made.experts, expert, token)
                taken[expert] += 1
    return torch.stack(rows)


def output(stack: Any, expert: int, token: torch.Tensor) -> torch.Tensor:
    def added(name: str) -> Any:
        bias = getattr(stack, f"{name}_bias")
        return 0.0 if bias is None else bias[expert]

    up = stack.up[expert] @ token + added("up")
    if stack.kind == "swiglu":
        gate = stack.gate[expert] @ token + added("gate")
        up = gate * torch.sigmoid(gate) * up
    else:
        up = torch.nn.functional.gelu(up) if stack.kind == "gelu" else up.clamp(min=0)
    return stack.down[expert] @ up + added("down")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 1, "normalize": True},
        {"top_k": 3, "softmax": "after", "kind": "gelu", "bias": True},
        {"top_k": 2, "normalize": False, "kind": "relu"},
        {"top_k": 2, "capacity_factor": 0.5},
        {"top_k": 1, "capacity_factor": 1.0, "bias": True},
    ],
)
def test_it_returns_the_weighted_sum_of_the_chosen_experts(options: dict[str, Any]) -> None:
    made = layer(**options)
    x = tokens()
    found, expected = made(x), one_by_one(made, x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    weights = torch.linspace(-1, 1, found.numel(), dtype=x.dtype).view_as(found)
    inputs = [x, *made.parameters()]
    for own, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs, allow_unused=True),
        strict=True,
    ):
        assert torch.allclose(own, torch.zeros_like(own) if other is None else other, rtol=0, atol=1e-12)


def test_any_leading_dims_and_no_tokens_are_taken() -> None:
    made = layer()
    x = tokens().detach()
    assert torch.equal(made(x.view(1, TOKENS, WIDTH)), made(x).view(1, TOKENS, WIDTH))
    assert made(x[:0]).shape == (0, WIDTH)
    made(x[:0]).sum().backward()
    assert all(parameter.grad is not None for parameter in made.experts.parameters())


def test_losses_of_the_router_are_those_of_their_papers() -> None:
    made = layer(top_k=2, balance_coefficient=0.5, z_coefficient=0.25)
    x = tokens()
    made(x)
    scores = x @ made.router.weight.T
    probabilities = scores.softmax(-1)
    chosen = probabilities.topk(2, -1).indices.flatten().tolist()
    fractions = torch.tensor([chosen.count(number) / len(chosen) for number in range(EXPERTS)])
    balance = EXPERTS * (fractions * probabilities.mean(0)).sum()
    z = scores.exp().sum(-1).log().square().mean()
    assert made.balance_loss is not None
    assert made.z_loss is not None
    assert float(made.balance_loss.detach()) == pytest.approx(float(balance.detach()), abs=1e-12)
    assert float(made.z_loss.detach()) == pytest.approx(float(z.detach()), abs=1e-12)
    assert float(auxiliary_loss(made).detach()) == pytest.approx(float((0.5 * balance + 0.25 * z).detach()), abs=1e-12)


def test_losses_that_are_not_there_or_have_no_gradients_are_refused() -> None:
    with pytest.raises(UsageError, match="no layer MixtureOfExperts with balance_coefficient"):
        auxiliary_loss(layer())
    made = layer(z_coefficient=0.1)
    with pytest.raises(UsageError, match="has had no pass in training"):
        auxiliary_loss(made)
    with torch.no_grad():
        made(tokens())
    with pytest.raises(UsageError, match="use_reentrant"):
        auxiliary_loss(made)


def test_copies_begin_without_losses() -> None:
    made = layer(z_coefficient=0.1)
    made(tokens())
    assert copy.deepcopy(made).z_loss is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 6}, "top_k=6: give 1 to 5"),
        ({"kind": "tanh"}, "choices: swiglu, gelu, relu"),
        ({"softmax": "never"}, "choices: before, after"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0: give a factor above 0"),
        ({"jitter": 1.0}, "jitter=1.0"),
        ({"experts": [torch.nn.Linear(WIDTH, WIDTH)]}, "num_experts=5, and there are 1 modules"),
        ({"experts": [torch.nn.Linear(WIDTH, WIDTH, bias=number > 0) for number in range(5)]}, "give equal ones"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)
