"""Parameters that a rank has a part of, or none: using their values is right or an error that says what to do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist.errors import UsageError
from unidist_torch.models.guarded_parameter import (
    AbsentParameter,
    CutParameter,
    LentParameter,
    guard,
    name_guard,
    plain_part,
    plain_use,
    unguard,
    unsaved,
)

lists: Any = torch  # whose functions of lists of tensors have no types
VALUES = torch.arange(1.0, 17.0).reshape(4, 4)


def made(kind: type[torch.nn.Parameter]) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(VALUES.clone())
    name_guard(parameter, "layer.weight", 1, strategy="tensor", remedy="use the role replicate")
    guard(parameter, kind)
    return parameter


TERMS: dict[str, Callable[[Any], Any]] = {
    "orthogonality": lambda p: ((p @ p.t() - torch.eye(4)) ** 2).sum(),
    "L2 by hand": lambda p: (p**2).sum(),
    "L1 by hand": lambda p: p.abs().mean(),
    "distance from old weights": lambda p: (torch.ones(4, 4) * (p - p.detach().clone()) ** 2).sum(),
    "logged norm": lambda p: p.data.norm(),
    "logged norms of all": lambda p: lists._foreach_norm([p]),
    "largest": lambda p: p.detach().abs().max(),
    "one row": lambda p: p[0].tolist(),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "use in another layer": lambda p: F.linear(torch.ones(4, 4), p),
    "softmax": lambda p: p.softmax(-1),
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("kind", [CutParameter, AbsentParameter])
def test_what_would_be_of_a_part_alone_is_an_error_that_names_the_parameter(
    term: str, kind: type[torch.nn.Parameter]
) -> None:
    with pytest.raises(UsageError, match=r"parameter 'layer.weight' on rank 1") as caught:
        TERMS[term](made(kind))
    assert "\n" not in str(caught.value)
    hint = "unidist_zero.gathered(model)" if kind is AbsentParameter else "(strategy tensor)"
    assert hint in str(caught.value)


@pytest.mark.parametrize("kind", [CutParameter, AbsentParameter])
def test_shape_type_and_gradient_are_there(kind: type[torch.nn.Parameter]) -> None:
    parameter = made(kind)
    assert isinstance(parameter, torch.nn.Parameter)
    assert (parameter.numel(), parameter.shape, parameter.size(0), parameter.dim()) == (16, (4, 4), 4, 2)
    assert (parameter.dtype, parameter.device.type, parameter.requires_grad) == (torch.float32, "cpu", True)
    assert parameter.is_floating_point()
    assert parameter.is_leaf
    assert len(parameter) == 4
    assert "Parameter" in repr(parameter)
    assert {parameter: 1}[parameter] == 1
    assert torch.zeros_like(parameter).sum() == 0
    parameter.grad = torch.ones(4, 4)
    assert bool((parameter.grad == 1).all())
    parameter.requires_grad_(False)
    assert not parameter.requires_grad


def test_a_model_whose_parameters_are_away_may_be_moved() -> None:
    model = torch.nn.Linear(4, 4)
    model.weight.data = torch.zeros(()).expand(4, 4)
    name_guard(model.weight, "layer.weight", 1)
    guard(model.weight, AbsentParameter)
    parameter = model.weight
    model.cpu()
    assert model.to("cpu", torch.float32).weight is parameter
    model.double()
    assert model.weight is parameter
    assert (parameter.dtype, parameter.shape, parameter.stride()) == (torch.float64, (4, 4), (0, 0)), "no memory"
    for use in (lambda: parameter.cpu().sum(), lambda: parameter.half() * 2):
        with pytest.raises(UsageError, match=r"'layer.weight' on rank 1"):
            use()


def test_averages_of_a_part_are_parts() -> None:
    parameter = made(CutParameter)
    average = parameter.detach().clone()
    shadow = torch.zeros(4, 4)
    with torch.no_grad():
        average.mul_(0.5).add_(parameter, alpha=0.5)
        shadow.lerp_(parameter, 0.5)
        shadow = 0.5 * shadow + 0.5 * parameter.data
        lists._foreach_lerp_([average], [parameter], 0.5)
        parameter.data.copy_(average)
        parameter.copy_(VALUES)
    with plain_use():
        assert torch.equal(average, VALUES)
    assert torch.equal(shadow, 0.75 * VALUES)
    copied = copy.deepcopy(parameter)
    assert type(copied) is CutParameter
    with pytest.raises(UsageError, match=r"'layer.weight' on rank 1"):
        copied.sum()


def test_a_copy_of_a_whole_parameter_says_that_it_was_made_too_early() -> None:
    with pytest.raises(UsageError, match=r"\(4, 4\) and \(8, 4\).*after distribute\(\)"):
        torch.ones(8, 4).copy_(made(CutParameter).detach())


def test_files_hold_plain_tensors() -> None:
    parameter = made(CutParameter)
    file = io.BytesIO()
    torch.save({"weight": parameter.detach()}, file)
    file.seek(0)
    loaded = torch.load(file)["weight"]
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, VALUES)
    assert type(pickle.loads(pickle.dumps(parameter.data))) is torch.Tensor
    assert bool((copy.deepcopy(parameter.data) * 1 == VALUES).numpy().all())
    assert parameter.detach().numpy().sum() == VALUES.sum()


@pytest.mark.parametrize("values", [made(CutParameter).detach(), VALUES.clone()], ids=["part", "layer"])
def test_values_that_may_be_in_no_file_can_be_used(values: torch.Tensor) -> None:
    values = unsaved(values, "use ud.save")
    copies = [values, values.clone(), values.to("cpu").contiguous(), values.double(), copy.deepcopy(values)]
    for each in copies:
        for write in (pickle.dumps, lambda tensor: tensor.untyped_storage(), lambda tensor: tensor.storage()):
            with pytest.raises(UsageError, match=r"^use ud\.save$"):
                write(each)
        assert torch.equal(torch.zeros(4, 4).copy_(each), VALUES)
        assert bool((each * 2 == VALUES * 2).numpy().all())
        assert each.data_ptr() != 0
        assert "Values" in repr(each) or "Layer" in repr(each)
    assert values.data_ptr() == copies[0].data_ptr()


@pytest.mark.parametrize(
    "of", [lambda p: p.detach(), lambda p: unsaved(VALUES.clone(), "use ud.save")], ids=["part", "layer"]
)
def test_a_deep_copy_of_many_has_the_values_of_each(of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
    for _ in range(30):
        values = [of(made(CutParameter)).mul_(number) for number in range(12)]
        for each, copied in zip(values, copy.deepcopy(values), strict=True):
            assert bool((each == copied).numpy().all())


def test_values_of_a_layer_are_whole() -> None:
    values = unsaved(VALUES.clone(), "use ud.save")
    assert type(values.sum()) is torch.Tensor
    assert values.norm() == VALUES.norm()
    assert torch.equal(torch.nn.Parameter(VALUES.clone()) @ values, VALUES @ VALUES)
    with pytest.raises(UsageError, match=r"'layer.weight' on rank 1"):
        values @ made(CutParameter)


def test_layers_and_optimizers_use_the_part_as_it_is() -> None:
    parameter = made(CutParameter)
    with plain_use():
        outputs = F.linear(torch.ones(1, 4), parameter)
    assert type(outputs) is torch.Tensor
    (outputs.sum() + plain_part(parameter).sum()).backward()
    assert bool((parameter.grad == 2).all())
    for options in ({}, {"foreach": True}, {"fused": True}):
        optimizer = lists.optim.AdamW([parameter], lr=0.1, **options)
        optimizer.step()
    with plain_use():
        assert bool((parameter < VALUES).all())
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)


def test_a_parameter_is_away_for_a_while() -> None:
    parameter = torch.nn.Parameter(VALUES.clone())
    guard(parameter, LentParameter)
    kept = parameter.data, parameter.detach()
    parameter.data = VALUES + 1
    assert all(torch.equal(each, VALUES) for each in kept), "copies"
    assert float(parameter.sum().detach()) == float(VALUES.sum()) + 16
    guard(parameter, AbsentParameter)
    with pytest.raises(UsageError):
        parameter.detach()
    unguard(parameter)
    assert type(parameter) is torch.nn.Parameter
    assert torch.equal(parameter, VALUES + 1)


def test_parameters_of_a_librarys_own_class_are_left_alone() -> None:
    class Own(torch.nn.Parameter):
        """A class that a library brings."""

    parameter = Own(VALUES.clone())
    guard(parameter, CutParameter)
    assert type(parameter) is Own
