"""Optimizers whose parameters and state are bfloat16 step in float32."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from unidist.errors import UsageError
from unidist.gradients.precision import Rounding
from unidist_torch.optimizer import narrow_step
from unidist_torch.optimizer.narrow_step import ElementRange, NarrowStep, SteppedTensor


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in [(7, 5), (30,), ()]]
    return [tensor.requires_grad_() for tensor in made]


def give_gradients(leaves: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for leaf in leaves:
        leaf.grad = torch.randn(leaf.shape, generator=generator).bfloat16().to(leaf.dtype)


def stepped(leaves: list[Any], optimizer: Any) -> list[SteppedTensor]:
    groups = {id(leaf): number for number, group in enumerate(optimizer.param_groups) for leaf in group["params"]}
    return [
        SteppedTensor(leaf, groups[id(leaf)], [ElementRange(number, 0, 0, leaf.numel())])
        for number, leaf in enumerate(leaves)
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
@pytest.mark.parametrize("part", [1 << 22, 20])
def test_a_step_is_that_in_float32_and_then_rounded(
    kind: type[torch.optim.Optimizer], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow_step, "_PART_ELEMENTS", part)
    options = {"lr": 0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    leaves, wide = parameters(), parameters(torch.float32)
    optimizer = kind([{"params": leaves[:2]}, {"params": leaves[2:], "lr": 0.1}], **options)
    expected = kind([{"params": wide[:2]}, {"params": wide[2:], "lr": 0.1}], **options)
    inner = NarrowStep(kind, Rounding.NEAREST)
    for step in range(4):
        give_gradients(leaves, step)
        give_gradients(wide, step)
        inner.step(optimizer, stepped(leaves, optimizer), step)
        expected.step()
        for leaf, other in zip(leaves, wide, strict=True):
            other.data.copy_(other.data.bfloat16())  # both go on from what was rounded
            for name, value in expected.state[other].items():
                if value is not None and name != "step":
                    value.copy_(value.bfloat16())
                    assert optimizer.state[leaf][name].dtype is torch.bfloat16
                    assert torch.equal(optimizer.state[leaf][name].float(), value), name
            assert torch.equal(leaf.float(), other)


def test_small_updates_are_lost_if_rounded_to_the_nearest_and_kept_in_the_mean_if_stochastically() -> None:
    for rounding, moved in ((Rounding.NEAREST, 0.0), (Rounding.STOCHASTIC, 0.1)):
        (leaf,) = leaves = [torch.ones(20_000, dtype=torch.bfloat16).requires_grad_()]
        optimizer = torch.optim.SGD(leaves, lr=1e-3)  # the neighbours of 1 are 1/128 and 1/256 away
        inner = NarrowStep(torch.optim.SGD, rounding)
        for step in range(100):
            leaf.grad = torch.ones_like(leaf)
            inner.step(optimizer, stepped(leaves, optimizer), step)
        assert abs(1 - leaf.detach().float().mean().item() - moved) < 0.002


def test_the_second_moment_of_adam_follows_gradients_that_become_smaller() -> None:
    """With beta2=0.999 a change is 1/1000 of the value, below half the distance of neighbours."""
    for rounding, follows in ((Rounding.NEAREST, False), (Rounding.STOCHASTIC, True)):
        (leaf,) = leaves = [torch.ones(5_000, dtype=torch.bfloat16).requires_grad_()]
        optimizer = torch.optim.Adam(leaves, lr=1e-4)
        inner = NarrowStep(torch.optim.Adam, rounding)
        for step in range(400):
            leaf.grad = torch.full_like(leaf, 0.0 if step else 1.0)
            inner.step(optimizer, stepped(leaves, optimizer), step)
        second = optimizer.state[leaf]["exp_avg_sq"].float().mean().item()
        assert (abs(second / (0.001 * 0.999**399) - 1) < 0.02) == follows


def test_a_parameter_in_float32_is_updated_as_it_is() -> None:
    leaves = [torch.ones(5, requires_grad=True), torch.ones(5, dtype=torch.bfloat16).requires_grad_()]
    optimizer = torch.optim.AdamW(leaves, lr=1e-3)
    give_gradients(leaves, 0)
    NarrowStep(torch.optim.AdamW, Rounding.STOCHASTIC).step(optimizer, stepped(leaves, optimizer), 0)
    assert [optimizer.state[leaf]["exp_avg"].dtype for leaf in leaves] == [torch.float32, torch.bfloat16]
    assert leaves[0].ne(1).all()


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some third-party optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_an_optimizer_that_counts_steps_in_its_groups_is_refused() -> None:
    leaves = parameters()
    optimizer = Counting(leaves, lr=0.1)
    give_gradients(leaves, 0)
    with pytest.raises(UsageError, match="Counting keeps numbers of its steps in its parameter groups"):
        NarrowStep(Counting, Rounding.STOCHASTIC).step(optimizer, stepped(leaves, optimizer), 0)
