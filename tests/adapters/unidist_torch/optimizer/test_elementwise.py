"""Whether an optimizer may step on parts of tensors is found out by trying it."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.errors import UsageError

torch = pytest.importorskip("torch")

from whole_torch import FOOLING, MuonWithAdam, muon_groups  # noqa: E402

from unidist_torch.optimizer.clone import clone_for  # noqa: E402
from unidist_torch.optimizer.elementwise import groups_of_whole_tensors, needs_whole_tensors  # noqa: E402


def parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(4, 2))]


def large_parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(shape)) for shape in ((400, 300), (9,), (5, 4, 3, 3), ())]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("SGD", False),
        ("Adam", False),
        ("AdamW", False),
        ("NAdam", False),
        ("RMSprop", False),
        ("Adagrad", False),
        ("Rprop", False),
        ("ASGD", False),
        ("Adafactor", True),
        ("Muon", True),
    ],
)
def test_stock_optimizers(name: str, whole: bool) -> None:
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this version of PyTorch has no {name}")
    assert needs_whole_tensors(kind(parameters(), lr=0.1)) is whole


@pytest.mark.parametrize("name", FOOLING)
def test_a_rule_for_some_tensors_or_some_steps_is_found(name: str) -> None:
    assert needs_whole_tensors(FOOLING[name](large_parameters()))


def test_a_rule_for_tensors_that_the_script_does_not_have_is_no_matter() -> None:
    small = ("large matrices", "blocks of many elements", "four dims", "one dim")
    assert [needs_whole_tensors(FOOLING[name](parameters())) for name in small] == [False, False, False, True]
    # The parts of a matrix are flat, so the rule for one dim would act on them.


def test_groups_are_told_apart() -> None:
    groups = muon_groups(large_parameters())
    assert [group["use_muon"] for group in groups] == [True, False]
    assert groups_of_whole_tensors(MuonWithAdam(groups)) == [True, False]


def test_the_form_is_that_of_the_whole_parameter() -> None:
    part = torch.nn.Parameter(torch.ones(40, 300))
    optimizer = FOOLING["large matrices"]([part])
    assert groups_of_whole_tensors(optimizer) == [False]
    assert groups_of_whole_tensors(optimizer, shapes={id(part): (400, 300)}) == [True]


def test_a_step_that_changes_nothing_is_refused() -> None:
    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # of the tests
            pass

    with pytest.raises(UsageError, match="did not change the tensors of its param_groups"):
        needs_whole_tensors(Still(parameters(), lr=0.1))


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    assert needs_whole_tensors(torch.optim.Adafactor(parameters(), lr=0.0))


def test_one_group_that_needs_whole_tensors_is_enough() -> None:
    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # of the tests
            for group in self.param_groups:
                for parameter in group["params"]:
                    if group["normed"]:
                        parameter.grad /= parameter.grad.norm()
            super().step()

    first, second = parameters()
    groups = [{"params": [first], "normed": False}, {"params": [second], "normed": True}]
    assert needs_whole_tensors(Normed(groups, lr=0.1))
    assert not needs_whole_tensors(Normed(groups[:1], lr=0.1))


def test_what_looks_at_several_parameters_is_refused() -> None:
    class Global(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # of the tests
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
            super().step()

    with pytest.raises(UsageError, match="when there are others beside it"):
        needs_whole_tensors(Global(parameters(), lr=0.1))
    with pytest.raises(UsageError, match="asks for a closure"):
        needs_whole_tensors(torch.optim.LBFGS(parameters()))
    with pytest.raises(UsageError, match="dense gradients"):
        needs_whole_tensors(torch.optim.SparseAdam(parameters()))


def test_trying_changes_nothing() -> None:
    owned = parameters()
    optimizer = torch.optim.AdamW(owned, lr=torch.tensor(0.1), fused=True)
    for parameter in owned:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in owned]
    state = {name: value.clone() for name, value in optimizer.state[owned[0]].items()}
    random = torch.get_rng_state()
    assert not needs_whole_tensors(optimizer)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(parameter, value) for parameter, value in zip(owned, before, strict=True))
    assert all(torch.equal(optimizer.state[owned[0]][name], value) for name, value in state.items())
    assert optimizer.param_groups[0]["fused"]


def test_a_clone_has_options_and_attributes_but_tensors_of_its_own() -> None:
    optimizer = torch.optim.Adam(parameters(), lr=0.1, betas=(0.5, 0.6))
    optimizer.extra = [1]  # type: ignore[attr-defined]  # as a class of one's own would
    other = torch.nn.Parameter(torch.zeros(2))
    clone = clone_for(optimizer, torch.optim.Adam, [[other]])
    clone.extra.append(2)
    assert optimizer.extra == [1]  # type: ignore[attr-defined]
    assert clone.param_groups[0]["betas"] == (0.5, 0.6)
    other.grad = torch.ones(2)
    clone.step()
    assert float(other.detach()[0]) == pytest.approx(-0.1)
    assert not optimizer.state
