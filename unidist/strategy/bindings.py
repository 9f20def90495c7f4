"""Bindings: the implementation of a strategy for one framework, registered by (strategy, framework).

A strategy is free of any framework. Where it has to touch models or optimizers, it asks the runtime for its binding to
the model's framework: `runtime.plugins.binding("zero", framework)`. Anybody can register one: a plugin that brings a
framework, for our strategies; a plugin that brings a strategy, for our frameworks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from unidist.errors import ConfigurationError
from unidist.registry import Registry, load_object


@dataclass(frozen=True)
class BindingSpec:
    """A strategy's binding to a framework, not yet imported.

    Args:
        strategy: name of the strategy.
        framework: name of the framework adapter.
        path: "module:Class"; the class is made without arguments, and implements the Protocol that the strategy
            documents for its bindings.
    """

    kind: ClassVar[str] = "binding"
    hook: ClassVar[str] = "unidist_register_bindings"

    strategy: str
    framework: str
    path: str

    @property
    def name(self) -> str:
        """The pair, as registries and messages name it: "zero/torch"."""
        return f"{self.strategy}/{self.framework}"

    @property
    def summary(self) -> str:
        """One line for lists."""
        return f"strategy {self.strategy} on {self.framework}"

    def load(self) -> Any:
        """Import the class and return a new instance."""
        return load_object(self.path, f"binding {self.name!r}")()


def find_binding(registry: Registry[BindingSpec], strategy: str, framework: str) -> BindingSpec:
    """Return the binding of a strategy to a framework.

    Raises:
        ConfigurationError: there is none; lists the frameworks for which there is one.
    """
    found = [spec for spec in registry if spec.strategy == strategy]
    for spec in found:
        if spec.framework == framework:
            return spec
    able = ", ".join(sorted(spec.framework for spec in found)) or "none"
    raise ConfigurationError(
        f"strategy {strategy!r} has no binding for the framework {framework!r}; it has for: {able}. A plugin can "
        "register one: unidist_register_bindings"
    )
