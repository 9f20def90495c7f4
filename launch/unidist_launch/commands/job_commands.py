"""Commands that run a program of their plugin on all ranks, with the options of `unidist launch` that concern it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from unidist.launcher import JobObserver
from unidist_launch.commands.launch import launch, run_job
from unidist_launch.options import ELASTIC_GROUP
from unidist_launch.options.launch_options import add_options
from unidist_launch.options.observer_options import ObservedCommand

_ABOUT_SCRIPTS = frozenset(
    ("module", "as_horovod", "strategy", "verify", "autotune", "autotune_log_file", "quiet", "help")
)
"""Options about a script that trains, which the program of a command is not."""


def job_command(function: Callable[..., int]) -> ObservedCommand:
    """Make a command of a function that calls `run_program`; to be written above the decorators of its options.

    The command also has the options of `unidist launch` that say how many ranks run, where, and how they communicate:
    not those about a script that trains, nor those of elastic jobs. The function gets all that are not its own as
    keyword arguments, to be handed on to `run_program`.
    """
    command: ObservedCommand = click.command(
        cls=ObservedCommand, context_settings={"help_option_names": ["-h", "--help"]}
    )(add_options(function))
    of_launch = {parameter.name for parameter in launch.params}
    kept = [each for each in command.params if each.name not in _ABOUT_SCRIPTS and _group(each) != ELASTIC_GROUP]
    command.params = sorted(kept, key=lambda each: each.name in of_launch)  # its own options are shown first
    return command


def run_program(
    ctx: click.Context,
    module: str,
    argument: Any,
    options: Mapping[str, Any],
    *,
    observers: tuple[JobObserver, ...] = (),
) -> int:
    """Run a module on all ranks, and show of what they print standard error alone.

    Args:
        ctx: of the command, which `job_command` has made.
        module: the program, as in `python -m`.
        argument: its only argument, which it gets as JSON.
        options: what the command got of the options of `unidist launch`.
        observers: what they print is told to these.

    Returns:
        The exit code, see `unidist.launcher.Launcher.run`.

    Raises:
        ConfigurationError: see `unidist launch`; nothing is started.
    """
    absent = {parameter.name: None for parameter in launch.params if parameter.name not in options}
    complete = {**absent, **options, "module": True, "quiet": True}
    return run_job(ctx, (module, json.dumps(argument)), complete, more_observers=observers, shows_stdout=False)


def _group(parameter: click.Parameter) -> str:
    return getattr(parameter, "group", "")
