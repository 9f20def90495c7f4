"""The figures of a script's own model: the function that makes it is called, where possible without memory for it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from unidist.cost_model.figures import ActivationModel, ModelFigures, ParameterFigures
from unidist.cost_model.memory_interface import SizesModels
from unidist.errors import ConfigurationError
from unidist.framework import Framework, FrameworkSpec
from unidist.registry import Registry

_log = logging.getLogger("unidist")


@dataclass(frozen=True)
class ScriptModel:
    """A model that a script's function has made.

    Args:
        reference: of the function.
        framework: of the model.
        model: possibly without memory for its parameters.
        inputs: that came with it, for one pass; none if none came.
    """

    reference: str
    framework: Framework
    model: Any
    inputs: tuple[Any, ...]

    def parameters(self) -> Mapping[str, ParameterFigures]:
        """Return the size of every parameter by its path.

        Raises:
            ConfigurationError: its framework cannot say.
        """
        if not isinstance(self.framework, SizesModels):
            raise ConfigurationError(f"{self.framework.name} cannot say how large a model is; give numbers instead")
        return self.framework.parameter_figures(self.model)

    def activations(self) -> ActivationModel | None:
        """Return what a forward pass on the inputs keeps; None without inputs, or if the framework does not show it.

        Raises:
            ConfigurationError: the model cannot run on the inputs.
        """
        if not self.inputs or not isinstance(self.framework, SizesModels):
            return None
        return _activations(self.framework, self.model, list(self.inputs), self.reference)


def model_from(reference: str, frameworks: Registry[FrameworkSpec]) -> ScriptModel:
    """Return the model that a function returns.

    Args:
        reference: "module:function" or "path/to/file.py:function". The function takes no arguments and returns the
            model, or a tuple of the model and its inputs for one pass. Modules are found as `python -m` finds them: in
            the current folder first.
        frameworks: asked for what they know.

    Raises:
        ConfigurationError: there is no such function, it fails, or what it returns is no model of a framework.
    """
    build = _load(reference)
    made = _build(build, reference, frameworks)
    model, *inputs = made if isinstance(made, tuple) and made else (made,)
    for framework in _loaded(frameworks):
        if framework.is_model(model):
            return ScriptModel(reference, framework, model, tuple(inputs))
    known = ", ".join(spec.name for spec in frameworks)
    raise ConfigurationError(f"{reference} returned {type(model).__name__}: no model of {known}")


def figures_from(reference: str, frameworks: Registry[FrameworkSpec]) -> tuple[ModelFigures, ActivationModel | None]:
    """Return the figures of the model that a function returns, and what its forward pass keeps, where that is known.

    Args:
        reference: see `model_from`. Activations are counted with the inputs that come with the model.
        frameworks: likewise.

    Raises:
        ConfigurationError: see `model_from`; or its framework does not know, or it cannot run on its inputs.
    """
    found = model_from(reference, frameworks)
    return ModelFigures.of(found.parameters()), found.activations()


def _activations(framework: SizesModels, model: Any, inputs: list[Any], reference: str) -> ActivationModel | None:
    try:
        found = framework.activations(model, inputs)
    except Exception as exc:  # whatever the user's model raises
        raise ConfigurationError(
            f"the model of {reference} cannot run on the inputs that it came with: {type(exc).__name__}: {exc}. "
            "Return the model alone; activations are then left out"
        ) from exc
    if found is None:
        _log.warning("activations of %s are left out: its framework does not show what is kept", reference)
    return found


def _load(reference: str) -> Callable[[], Any]:
    source, _, name = reference.rpartition(":")
    if not (source and name):
        raise ConfigurationError(f"{reference!r} cannot be read. Syntax: module:function, or path/to/file.py:function")
    try:
        module = _module_of_file(source) if source.endswith(".py") else _module(source)
    except Exception as exc:  # whatever the user's module raises
        raise ConfigurationError(f"{source} cannot be imported: {type(exc).__name__}: {exc}") from exc
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigurationError(f"{source} has no function {name!r}. It has: {', '.join(functions) or '(none)'}")
    build: Callable[[], Any] = function
    return build


def _module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _module_of_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no such file in {os.getcwd()}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # as if the script were run
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    spec.loader.exec_module(module)
    return module


def _build(build: Callable[[], Any], reference: str, frameworks: Registry[FrameworkSpec]) -> Any:
    sizers = [framework for framework in _loaded(frameworks) if isinstance(framework, SizesModels)]
    contexts = [context for context in (framework.without_memory() for framework in sizers) if context is not None]
    if contexts:
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                return build()
        except Exception as exc:  # a model that looks at its own values cannot be built without any
            _log.warning("%s cannot be built without memory (%s); building it as it is", reference, exc)
    try:
        return build()
    except Exception as exc:  # whatever the user's function raises
        raise ConfigurationError(f"{reference} failed: {type(exc).__name__}: {exc}") from exc


def _loaded(frameworks: Registry[FrameworkSpec]) -> Iterator[Framework]:
    """Yield the frameworks that the script has imported: no other one can have made its model."""
    for spec in frameworks:
        if spec.requires in sys.modules:
            yield spec.load()
