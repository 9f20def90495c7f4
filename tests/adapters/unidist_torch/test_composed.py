"""Optimizers that leave the step to others within them are taken for one, if options and state are theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from whole_torch import Composed

from unidist.errors import UsageError
from unidist_torch.composed import check_composed, parts_of
from unidist_torch.optimizer import clone_for, groups_of_whole_tensors
from unidist_torch.parameter_states import ParameterStates


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in ((4, 6), (5,))]


def stepped() -> tuple[Composed, list[torch.nn.Parameter]]:
    both = parameters()
    optimizer = Composed(both)
    for each in both:
        each.grad = torch.full_like(each, 0.5)
    optimizer.step()
    return optimizer, both


def test_most_optimizers_hold_no_others() -> None:
    assert parts_of(torch.optim.AdamW(parameters())) == []
    assert [type(each).__name__ for each in parts_of(Composed(parameters()))] == ["MuonWithAdam", "AdamW"]


def test_each_group_is_tried_by_itself() -> None:
    assert groups_of_whole_tensors(Composed(parameters())) == [True, False]


def test_a_clone_has_clones_of_the_others() -> None:
    optimizer, both = stepped()
    before = [each.detach().clone() for each in both]
    leaves = parameters()
    clone = clone_for(optimizer, Composed, [[leaf] for leaf in leaves])
    assert [group["params"] for group in clone.param_groups] == [[leaf] for leaf in leaves]
    clone.param_groups[1]["lr"] = 0.0
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, 0.5)
    clone.step()
    assert not torch.equal(leaves[0], torch.ones_like(leaves[0]))
    assert torch.equal(leaves[1], torch.ones_like(leaves[1])), "its learning rate is 0"
    assert all(torch.equal(each, value) for each, value in zip(both, before, strict=True))
    assert optimizer.param_groups[1]["lr"] != 0.0


def test_the_state_is_theirs() -> None:
    optimizer, (matrix, bias) = stepped()
    states = ParameterStates(optimizer)
    assert {*states.of(matrix)} == {"momentum_buffer"}
    assert {*states.of(bias)} == {"step", "exp_avg", "exp_avg_sq"}
    taken = states.take(bias)
    assert not optimizer.optimizers["adam"].state
    states.replace(bias, taken)
    assert {*optimizer.optimizers["adam"].state[bias]} == {"step", "exp_avg", "exp_avg_sq"}
    assert not optimizer.state


class Apart(Composed):
    """Has groups of its own, as lists of optimizers do that take the place of one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups = [dict(group) for group in self.param_groups]


class Averaging(Composed):
    """Keeps averages beside the state of the others."""

    def step(self, closure: Any = None) -> Any:
        """Update, then average."""
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = parameter.detach().clone()


@pytest.mark.parametrize(
    ("kind", "problem"), [(Apart, "has param_groups that are not theirs"), (Averaging, "keeps state beside theirs")]
)
def test_what_cannot_be_taken_for_one_is_refused(kind: type[Composed], problem: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{kind.__name__} leaves the step to .*\(MuonWithAdam, AdamW\), and {problem}"
    ):
        groups_of_whole_tensors(kind(parameters()))


def test_state_that_is_also_the_outer_ones_is_no_matter() -> None:
    optimizer, _ = stepped()
    for part in optimizer.optimizers.values():
        optimizer.state.update(part.state)
    check_composed(optimizer)
