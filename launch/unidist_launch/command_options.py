"""Options of commands of this package: a kind of plugins that it adds to those of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pluggy

from unidist.registry import Registry, load_object

if TYPE_CHECKING:
    from click import Option

__all__ = ["CommandOptionsSpec", "unidist_register_command_options"]

hookspec = pluggy.HookspecMarker("unidist")


@dataclass(frozen=True)
class CommandOptionsSpec:
    """Options that a plugin adds to a command of this package, and the function that is called when one is given.

    Args:
        name: by which lists name it.
        command: the word after `unidist`: "doctor". Not every command takes options; see docs/plugins.md.
        path: "module:function". It is called instead of the command, with the values of all of its options by
            parameter name, and returns the exit code.
        summary: one line for lists.
        options: the options. Without a value on the command line each shall be None.
    """

    kind: ClassVar[str] = "command options"
    hook: ClassVar[str] = "unidist_register_command_options"

    name: str
    command: str
    path: str
    summary: str
    options: tuple[Option, ...]

    def load(self) -> Callable[[Mapping[str, Any]], int]:
        """Import and return the function."""
        return cast("Callable[[Mapping[str, Any]], int]", load_object(self.path, f"command options {self.name!r}"))


@hookspec
def unidist_register_command_options(registry: Registry[CommandOptionsSpec]) -> None:
    """Register options of commands of this package. Called when such a command is used: be quick."""
