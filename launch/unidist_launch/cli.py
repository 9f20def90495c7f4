"""The `unidist` command: its sub-commands are imported when they are used."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from unidist._version import __version__
from unidist.errors import ConfigurationError, UnidistError, unknown_choice
from unidist.jobs import run_program
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist_launch import plugin
from unidist_launch.command_spec import CommandSpec

_EXIT_CONFIGURATION = 2
_EXIT_INTERRUPTED = 130
_LAUNCHES = ("run", "start", "exec", "train")
"""Words that other tools have for what `launch` does."""
# What click raises for a group without a sub-command, since 8.2; before, it printed the help itself.
_ONLY_HELP: tuple[type[Exception], ...] = tuple(filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)]))


class _Commands(click.Group):
    """A group whose commands are those that plugins register, each imported when it is used.

    The commands of this package are found without loading any other plugin: they start at once, whatever is installed,
    and decide themselves which plugins they load (`launch -p no:NAME`).
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return our own names in the order in which they are registered, then those of other plugins."""
        own = self._own
        return [*(spec.name for spec in own), *sorted(spec.name for spec in self._all if spec.name not in own)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of this name."""
        registry = self._own if cmd_name in self._own else self._all
        return registry.get(cmd_name).load() if cmd_name in registry else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a command line, or say which there are."""
        if args[0] not in self._own and args[0] not in self._all and not args[0].startswith("-"):
            if args[0] in _LAUNCHES or args[0].endswith(".py"):
                script = args[0] if args[0] not in _LAUNCHES else "train.py"
                raise ConfigurationError(
                    f"there is no command {args[0]!r}; to start a script, write `unidist launch -np 2 {script}`."
                )
            raise unknown_choice("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names with their summaries, which takes no import of the commands."""
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._all.get(name).summary) for name in names])

    @functools.cached_property
    def _own(self) -> Registry[CommandSpec]:
        registry = Registry[CommandSpec](CommandSpec.kind)
        plugin.unidist_register_commands(registry)
        return registry

    @functools.cached_property
    def _all(self) -> Registry[CommandSpec]:
        manager = PluginManager(Settings.read().disabled_plugins).load()
        return manager.registry(CommandSpec) if CommandSpec in manager.kinds else self._own


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="unidist")
def cli() -> None:
    """Spread a training script over many processes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 2 for a command that cannot work, else what the command says."""
    run_program(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> object:
    _show_warnings()
    try:
        return cli.main(args=arguments, prog_name="unidist", standalone_mode=False)
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


def horovodrun() -> None:
    """Run `unidist horovodrun`: the console script of the distribution in the folder `horovodrun`."""
    main(["horovodrun", *sys.argv[1:]])


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
