"""What the framework says of models."""

from __future__ import annotations

import pytest
import torch

from unidist.cost_model.figures import ParameterFigures
from unidist.errors import UsageError
from unidist_torch.framework import TorchFramework


def test_every_parameter_is_sized_once_without_its_memory() -> None:
    framework = TorchFramework()
    with framework.without_memory():
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4, bias=False), "b": torch.nn.Linear(3, 4).double()})
    model["c"] = torch.nn.Linear(3, 4, bias=False)
    model["c"].weight = model["a"].weight
    model["b"].bias.requires_grad_(False)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert framework.parameter_figures(model) == {
        "a.weight": ParameterFigures(12, 4),
        "b.weight": ParameterFigures(12, 8),
        "b.bias": ParameterFigures(4, 8, trained=False),
    }


def test_a_lazy_parameter_has_no_size_yet() -> None:
    with pytest.raises(UsageError, match=r"'weight' has no shape yet"):
        TorchFramework().parameter_figures(torch.nn.LazyLinear(3))
