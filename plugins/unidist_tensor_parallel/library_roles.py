"""Roles that a library gives the layers of its models: a kind of plugin that this package adds to those of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pluggy

from unidist.registry import Registry, load_object

__all__ = ["TensorRolesSpec"]

hookspec = pluggy.HookspecMarker("unidist")

LibraryRoles = Callable[[Any, int], Mapping[str, str]]


@dataclass(frozen=True)
class TensorRolesSpec:
    """A library that says of its models which layers to cut, not yet imported.

    Args:
        name: of the library.
        path: "module:function". The function takes any model, and the number of ranks; it returns patterns of paths
            with roles, as the option `plan` has them, or {} for a model of which it knows nothing.
        summary: one line for lists.
    """

    kind: ClassVar[str] = "tensor roles"
    hook: ClassVar[str] = "unidist_register_tensor_roles"

    name: str
    path: str
    summary: str

    def load(self) -> LibraryRoles:
        """Import and return the function."""
        found: LibraryRoles = load_object(self.path, f"tensor roles {self.name!r}")
        return found


@hookspec
def unidist_register_tensor_roles(registry: Registry[TensorRolesSpec]) -> None:
    """Register libraries, for `tensor=N` without a plan. Their modules import no framework at the top."""
