"""Names that plugins add to `unidist.torch`, `unidist.tensorflow` and the other modules that scripts import."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

from unidist.registry import load_object

__all__ = ["FacadeNameSpec"]


@dataclass(frozen=True)
class FacadeNameSpec:
    """A name of a module that scripts import, not yet imported itself.

    Args:
        facade: the module without `unidist.`: "torch".
        attribute: the name in it: "data_service". One that the module defines itself hides it.
        path: "module:object", or "module" for a module.
    """

    kind: ClassVar[str] = "facade name"
    hook: ClassVar[str] = "unidist_register_facade_names"

    facade: str
    attribute: str
    path: str

    @property
    def name(self) -> str:
        """The name as a script has it: "torch.data_service"."""
        return f"{self.facade}.{self.attribute}"

    @property
    def summary(self) -> str:
        """One line for lists."""
        return f"the name unidist.{self.name}"

    def load(self) -> Any:
        """Import and return what it names."""
        return load_object(self.path, self.summary) if ":" in self.path else importlib.import_module(self.path)
