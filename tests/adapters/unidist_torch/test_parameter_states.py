"""What an optimizer keeps for its parameters: which of it are slots, and which numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from unidist_torch.parameter_states import ParameterStates

ROOT = Path(__file__).resolve().parents[3]


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[ParameterStates, list[torch.Tensor]]:
    """Return the states after a step of a matrix and of a parameter without dims, and these parameters."""
    parameters = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.tensor(2.0))]
    optimizer = kind(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return ParameterStates(optimizer), [*parameters]


@pytest.mark.parametrize(
    ("kind", "options", "slots", "scalars"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}, set()),
        (torch.optim.SGD, {}, set(), set()),
        (torch.optim.Adam, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
        (torch.optim.NAdam, {}, {"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
        (torch.optim.ASGD, {}, {"ax"}, {"step", "eta", "mu"}),
        (torch.optim.Rprop, {}, {"prev", "step_size"}, {"step"}),
    ],
)
def test_slots_and_numbers_also_of_a_parameter_without_dims(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], slots: set[str], scalars: set[str]
) -> None:
    states, parameters = stepped(kind, **options)
    for parameter in parameters:
        found = states.slots(parameter)
        assert (found.keys(), states.scalars(parameter).keys()) == (slots, scalars)
        assert all(value.shape == parameter.shape for value in found.values())


def test_nothing_is_made_by_looking() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    states = ParameterStates(torch.optim.Adam([parameter]))
    assert (states.of(parameter), states.slots(parameter), states.take(parameter), list(states)) == ({}, {}, {}, [])


def test_state_is_replaced_and_taken() -> None:
    states, (matrix, number) = stepped(torch.optim.Adam)
    states.replace(matrix, {})
    assert list(states) == [number]
    taken = states.take(number)
    assert (list(states), taken.keys()) == ([], {"step", "exp_avg", "exp_avg_sq"})
    states.replace(matrix, taken)
    assert states.of(matrix) is taken


def test_state_that_the_optimizer_loads_is_found() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    states = ParameterStates(optimizer)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": torch.ones(2)}}})
    assert states.slots(parameter)["momentum_buffer"].tolist() == [1, 1]


def test_no_other_module_looks_into_the_state_of_an_optimizer() -> None:
    folders = [ROOT / "adapters/unidist_torch", *ROOT.glob("plugins/*/_torch")]
    looking = re.compile(r"\b_?(optimizer|inner|outer|probe|plain)\.state(\[|\.|\)| )")
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*.py")
        if looking.search(path.read_text(encoding="utf-8"))
    }
    assert found <= {"adapters/unidist_torch/parameter_states.py"}
