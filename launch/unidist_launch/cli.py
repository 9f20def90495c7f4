"""The `unidist` command: its sub-commands are imported when they are used."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from unidist._version import __version__
from unidist.errors import PluginError, UnidistError, unknown_choice
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings

_OWN = {
    "launch": "unidist_launch.commands.launch:launch",
    "doctor": "unidist_launch.commands.doctor:doctor",
    "plugins": "unidist_launch.commands.plugins:plugins",
    "strategies": "unidist_launch.commands.strategies:strategies",
    "checkpoint": "unidist_launch.commands.checkpoint:checkpoint",
    "build": "unidist_launch.commands.build:build",
}
_EXIT_CONFIGURATION = 2
_EXIT_INTERRUPTED = 130
# What click raises for a group without a sub-command, since 8.2; before, it printed the help itself.
_ONLY_HELP: tuple[type[Exception], ...] = tuple(filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)]))


class _Commands(click.Group):
    """A group that imports its own commands when used, and asks plugins for theirs when it needs them."""

    _plugins_asked = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._ask_plugins()
        return [*_OWN, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OWN:
            module, _, attribute = _OWN[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        self._ask_plugins()
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise unknown_choice("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        name = name or cmd.name or ""
        if name in _OWN or name in self.commands:
            raise PluginError(f"command {name!r} exists already; give it another name.")
        super().add_command(cmd, name)

    def _ask_plugins(self) -> None:
        if not self._plugins_asked:
            self._plugins_asked = True
            PluginManager(Settings.read().disabled_plugins).load().notify("unidist_add_commands", cli=self)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="unidist")
def cli() -> None:
    """Spread a training script over many processes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 2 for a command that cannot work, else what the command says."""
    _show_warnings()
    try:
        code = cli.main(args=arguments, prog_name="unidist", standalone_mode=False)
    except click.ClickException as exc:
        if isinstance(exc, _ONLY_HELP):
            print(exc.format_message(), file=sys.stderr)
            sys.exit(_EXIT_CONFIGURATION)
        command = exc.ctx.command_path if isinstance(exc, click.UsageError) and exc.ctx else "unidist"
        _fail(f"{exc.format_message()}\nTry '{command} --help'.")
    except UnidistError as exc:
        _fail(str(exc))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_EXIT_INTERRUPTED)
    sys.exit(code)


def _fail(message: str) -> NoReturn:
    print(f"unidist: error: {message}", file=sys.stderr)
    sys.exit(_EXIT_CONFIGURATION)


def _show_warnings() -> None:
    """Write the library's warnings, such as problems of plugins, the way this command writes its own messages."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("unidist: %(levelname)s: %(message)s"))
    logging.addLevelName(logging.WARNING, "warning")
    logger = logging.getLogger("unidist")
    logger.addHandler(handler)
    logger.propagate = False
