"""Commands of `unidist`: a kind of plugins that this package adds to those of the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pluggy

from unidist.errors import PluginError
from unidist.registry import Registry, load_object

if TYPE_CHECKING:
    from click import Command

__all__ = ["CommandSpec", "unidist_register_commands"]

hookspec = pluggy.HookspecMarker("unidist")


@dataclass(frozen=True)
class CommandSpec:
    """A command `unidist NAME`, not yet imported.

    Args:
        name: the word after `unidist`.
        path: "module:object" of a `click.Command`, or of a group of them. Imported when the command is used.
        summary: one line for `unidist --help`.
    """

    kind: ClassVar[str] = "command"
    hook: ClassVar[str] = "unidist_register_commands"

    name: str
    path: str
    summary: str

    def load(self) -> Command:
        """Import and return the command.

        Raises:
            PluginError: it cannot be imported, or is not a command of click.
        """
        import click

        found = load_object(self.path, f"command {self.name!r}")
        if not isinstance(found, click.Command):
            raise PluginError(
                f"command {self.name!r}: {self.path!r} is a {type(found).__name__}, not a click.Command. Fix the "
                "plugin's path."
            )
        return found


@hookspec
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register commands of `unidist`: `registry.add(CommandSpec(name=..., path="module:command", summary=...))`.

    Called when `unidist` lists its commands, or is asked for one that is not its own.
    """
