"""Names that the tensors of a model have in the files of the library that the model is from: a kind of plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pluggy

from unidist.registry import Registry, load_object

__all__ = ["FileNamesSpec"]

hookspec = pluggy.HookspecMarker("unidist")

FileNames = Callable[[Any, list[str]], Mapping[str, str]]


@dataclass(frozen=True)
class FileNamesSpec:
    """A library whose models have other names in files than in memory, not yet imported.

    Args:
        name: of the library.
        path: "module:function". The function takes any model, and names of its tensors; it returns those that are
            others in files, with the name there: {} for a model that is not of the library. It raises for a model
            whose tensors are combined in files.
        summary: one line for lists.
    """

    kind: ClassVar[str] = "file names"
    hook: ClassVar[str] = "unidist_register_file_names"

    name: str
    path: str
    summary: str

    def load(self) -> FileNames:
        """Import and return the function."""
        found: FileNames = load_object(self.path, f"file names {self.name!r}")
        return found


@hookspec
def unidist_register_file_names(registry: Registry[FileNamesSpec]) -> None:
    """Register libraries, for `ud.load_pretrained`. Their modules import the library only if it is imported already."""
