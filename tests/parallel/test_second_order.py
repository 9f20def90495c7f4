"""Gradients of gradients in PyTorch: those of one process, or an error."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_second_order import errors_of, of_a_reduction

from unidist.errors import UsageError
from unidist.horovod_api.reduce_ops import Op

CASES = {
    ("perceptron", "data"): 1e-12,
    ("perceptron", "zero=1"): 1e-12,
    ("perceptron", "zero=2"): 1e-12,
    ("block", "zero=3"): 1e-12,
    ("block", "zero=3:shared=false"): 1e-12,
    ("block", "activations=recompute"): 1e-12,
    ("perceptron", "tensor=2"): 1e-12,
    ("block", "tensor=2"): 1e-12,
    ("encoder", "tensor=2:sequence=true"): 1e-9,
    ("experts", "expert=2"): 1e-12,
    ("perceptron", "precision=bf16"): 1e-2,
    ("perceptron", "precision=fp16:loss_scale=64"): 1e-3,
}
"""The largest difference of parameters; with a dropped penalty it is 0.05 and more."""


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


@pytest.mark.parallel
def test_a_gradient_penalty_trains_as_in_one_process(torch_pools: PartPools) -> None:
    found = torch_pools.get(2).run(errors_of, ([(*case, "shm") for case in CASES],))
    for errors in found:
        shown = dict(zip(CASES, errors, strict=True))
        assert {case: error for case, error in shown.items() if isinstance(error, str) or error > CASES[case]} == {}


@pytest.mark.parallel
def test_gradients_of_which_a_rank_has_a_part_are_not_differentiated(torch_pools: PartPools) -> None:
    for (error,) in torch_pools.get(2).run(errors_of, ([("block", "context=2", "shm")],)):
        assert "UsageError: context: a gradient was asked for with create_graph=True" in str(error)


@pytest.mark.parallel
def test_reductions_have_gradients_of_gradients(torch_pools: PartPools) -> None:
    # The gradient of a reduction is a reduction: twice 2 forward, and once more for each gradient.
    assert torch_pools.get(2).run(of_a_reduction, (Op.Sum,)) == pytest.approx([48.0, 48.0])
    assert torch_pools.get(2).run(of_a_reduction, (Op.Average,)) == pytest.approx([6.0, 6.0])


PROVEN = {
    "unidist_torch.operations.differentiable._Operation": "by the trainings above",
    "unidist_pipeline._torch.stage._Received": "returns what it gets",
}
"""Functions whose gradient may be differentiated, and what proves that it is right."""


def test_what_cannot_be_differentiated_twice_says_so() -> None:
    functions = {f"{each.__module__}.{each.__qualname__}": each for each in all_functions()}
    twice = {name for name, each in functions.items() if not refuses(each)}
    assert twice == set(PROVEN), "call `check_once` in its backward, or prove gradients of gradients here"
    assert len(functions) > len(twice)


def all_functions() -> Iterator[type]:
    """Yield the autograd functions of all packages of ours."""
    root = Path(__file__).parents[2]
    for path in sorted([*root.glob("adapters/**/*.py"), *root.glob("plugins/**/*.py"), *root.glob("unidist/**/*.py")]):
        if "autograd.Function" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            importlib.import_module(name.removeprefix("adapters.").removeprefix("plugins."))
    import torch

    for function in torch.autograd.Function.__subclasses__():
        if function.__module__.startswith("unidist"):
            yield function


def refuses(function: type) -> bool:
    """Return whether its backward raises where its result is to be differentiated."""
    try:
        function.backward(None, None)  # type: ignore[attr-defined]  # autograd functions have it
    except UsageError:
        return True
    except (AttributeError, TypeError):
        return False
    return False
