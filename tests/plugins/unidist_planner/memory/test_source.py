"""The model of a script, built by its own function, with a framework of the test's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from unidist.cost_model.figures import ActivationBytes, MeasuredActivations, ParameterFigures
from unidist.cost_model.memory_interface import SizesModels
from unidist.errors import ConfigurationError
from unidist.framework import FrameworkSpec
from unidist.registry import Registry
from unidist_planner.memory.source import figures_from

SCRIPT = """
class Model(list):
    pass

has_memory = True

def make():
    return Model(["w" if has_memory else "v"])

def make_with_values():
    if not has_memory:
        raise RuntimeError("no values here")
    return make()

def make_with_inputs():
    return make(), 7

def make_with_wrong_inputs():
    return make(), 7, 8

def wrong():
    return 7

def fails():
    raise ValueError("boom")
"""


class Toy(SizesModels):
    """A framework whose models are lists of parameter names; `v` is one without memory."""

    name = "toy"

    def is_model(self, value: object) -> bool:
        return type(value).__name__ == "Model"

    def without_memory(self) -> AbstractContextManager[Any]:
        @contextmanager
        def switched_off() -> Iterator[None]:
            module = sys.modules["toy_script"]
            module.has_memory = False  # type: ignore[attr-defined]
            try:
                yield
            finally:
                module.has_memory = True  # type: ignore[attr-defined]

        return switched_off()

    def parameter_figures(self, model: Any) -> Mapping[str, ParameterFigures]:
        return {name: ParameterFigures({"v": 3, "w": 5}[name]) for name in model}

    def activations(self, model: Any, inputs: Sequence[Any]) -> MeasuredActivations:
        if len(inputs) > 1:
            raise ValueError("too many inputs")
        return MeasuredActivations(ActivationBytes(inputs[0], 2, 5, 1), itemsize=4)


@pytest.fixture
def frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[FrameworkSpec]]:
    (tmp_path / "toy_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    registry: Registry[FrameworkSpec] = Registry("framework")
    registry.add(FrameworkSpec("absent", "no_such_module:Framework", "no_such_package", ""))
    registry.add(FrameworkSpec("toy", f"{__name__}:Toy", "sys", ""))
    yield registry
    sys.modules.pop("toy_script", None)


@pytest.mark.parametrize("source", ["toy_script:make", "toy_script.py:make", "./toy_script.py:make"])
def test_a_model_is_built_without_memory(frameworks: Registry[FrameworkSpec], source: str) -> None:
    figures, activations = figures_from(source, frameworks)
    assert figures.parameters == 3
    assert activations is None


def test_activations_are_those_of_the_inputs_that_come_with_the_model(frameworks: Registry[FrameworkSpec]) -> None:
    _, activations = figures_from("toy_script:make_with_inputs", frameworks)
    assert activations is not None
    assert activations.bytes(4) == ActivationBytes(7, 2, 5, 1)
    assert activations.bytes(2).blocks == 3.5


def test_inputs_that_do_not_fit_are_an_error_that_says_so(frameworks: Registry[FrameworkSpec]) -> None:
    with pytest.raises(ConfigurationError, match="cannot run on the inputs that it came with: ValueError: too many"):
        figures_from("toy_script:make_with_wrong_inputs", frameworks)


def test_a_model_that_needs_its_values_is_built_with_them(
    frameworks: Registry[FrameworkSpec], caplog: pytest.LogCaptureFixture
) -> None:
    assert figures_from("toy_script:make_with_values", frameworks)[0].parameters == 5
    assert "no values here" in caplog.text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("toy_script", "Syntax: module:function"),
        ("toy_script:", "Syntax: module:function"),
        ("toy_script:mak", "no function 'mak'. It has: Model, fails, make, make_with_inputs"),
        ("toy_script:wrong", "returned int: no model of absent, toy"),
        ("toy_script:fails", "toy_script:fails failed: ValueError: boom"),
        ("missing_module:make", "missing_module cannot be imported"),
        ("missing.py:make", "missing.py cannot be imported: FileNotFoundError"),
    ],
)
def test_what_is_no_model_is_an_error_that_says_why(
    frameworks: Registry[FrameworkSpec], source: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        figures_from(source, frameworks)
    assert message in str(caught.value)


def test_a_framework_that_cannot_size_models_says_so(frameworks: Registry[FrameworkSpec]) -> None:
    without: Registry[FrameworkSpec] = Registry("framework")
    without.add(FrameworkSpec("mute", f"{__name__}:OnlyRecognises", "sys", ""))
    with pytest.raises(ConfigurationError, match="mute cannot say how large"):
        figures_from("toy_script:make", without)


class OnlyRecognises:
    """A framework without the capability."""

    name = "mute"
    is_model = Toy.is_model
