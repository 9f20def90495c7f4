"""Optimizers on flat arrays give the numbers of the frameworks'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from unidist_parameter_server._torch.rules import counterpart, rule_of
from unidist_parameter_server.optimizers import AddDifference, FlatStep, Rule

Array = np.ndarray[Any, Any]
STEPS = 7


def stepped(rules: Sequence[Rule], start: Array, gradients: Sequence[Array], factor: float = 1.0) -> Array:
    """Return what the rules, one for each step, make of the parameters."""
    values, slots = start, [np.full_like(start, rules[0].first_value) for _ in rules[0].slots]
    for number, (rule, gradient) in enumerate(zip(rules, gradients, strict=True), start=1):
        before = gradient.copy()
        new = np.full_like(values, np.nan), [np.full_like(values, np.nan) for _ in slots]
        scratch = (np.full_like(values, np.nan), np.full_like(values, np.nan))
        rule.apply(FlatStep(values, new[0], gradient, slots, new[1], number, factor, scratch))
        assert np.array_equal(gradient, before), "what was pushed is not changed"
        values, slots = new
    return values


CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.3, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.95)}),
    (torch.optim.Adam, {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_numbers_of_torch(kind: type[torch.optim.Optimizer], options: dict[str, Any], dtype: str) -> None:
    chance = np.random.default_rng(0)
    start = chance.standard_normal(33).astype(dtype)
    gradients = [chance.standard_normal(33).astype(dtype) for _ in range(STEPS)]
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer: Any = kind([parameter], **options)
    rules = []
    for number, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)  # as schedulers do
        rules.append(rule_of(optimizer.param_groups[0], kind))
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    found = stepped(rules, start, gradients)
    assert found.dtype == dtype
    expected = parameter.detach().numpy()
    assert np.max(np.abs(found - expected)) <= (1e-13 if dtype == "float64" else 2e-6)
    assert len(counterpart(kind).slots) == len(rules[0].slots)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_factor_is_one_of_the_learning_rate(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    chance = np.random.default_rng(0)
    start, gradients = chance.standard_normal(5), [chance.standard_normal(5) for _ in range(STEPS)]
    group = {**kind([torch.nn.Parameter(torch.zeros(1))], **options).param_groups[0]}
    slow = {**group, "lr": group["lr"] / 4}
    found = stepped([rule_of(group, kind)] * STEPS, start, gradients, factor=0.25)
    assert np.allclose(found, stepped([rule_of(slow, kind)] * STEPS, start, gradients), rtol=1e-13, atol=0)


def test_a_difference_is_added() -> None:
    start, difference = np.arange(4.0), np.ones(4)
    assert np.array_equal(stepped([AddDifference()], start, [difference], factor=0.5), start + 0.5)
