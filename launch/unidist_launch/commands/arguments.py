"""Arguments of `unidist launch` that other commands pass on, such as those that write scripts for a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unidist.errors import ConfigurationError
from unidist_launch.commands.launch import launch


def launch_parameters(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of the parameters of `unidist launch`, by name, for these arguments.

    Raises:
        click.UsageError: an option is unknown, or its value cannot be read.
    """
    return launch.make_context("unidist launch", list(arguments)).params


def check_launch(arguments: Sequence[str], *, scheduler: str) -> None:
    """Refuse what `unidist launch` would refuse on a cluster, hours later.

    Args:
        arguments: of `unidist launch`.
        scheduler: what chooses the hosts, for messages.

    Raises:
        click.UsageError: an option is unknown, or its value cannot be read.
        ConfigurationError: there is nothing to run, or hosts are named.
    """
    parameters = launch_parameters(arguments)
    if not parameters["command"]:
        raise ConfigurationError("nothing to run: the script stands after the options of `unidist launch`.")
    for name in ("hosts", "hostfile"):
        if parameters[name] is not None:
            raise ConfigurationError(f"-H and --hostfile have no place here: {scheduler} chooses the nodes.")
