"""Registers the launchers and commands of this package; adds commands and observers of jobs as kinds of plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.launcher import LauncherSpec
from unidist.registry import Registry
from unidist_launch import command_options, command_spec, observers
from unidist_launch.command_options import CommandOptionsSpec
from unidist_launch.command_spec import CommandSpec
from unidist_launch.observers import ObserverSpec

if TYPE_CHECKING:
    from unidist.runtime import PluginManager


@hookimpl
def unidist_add_kinds(manager: PluginManager) -> None:
    """Let plugins register commands, and observers of jobs."""
    manager.add_kind(CommandSpec, command_spec)
    manager.add_kind(CommandOptionsSpec, command_options)
    manager.add_kind(ObserverSpec, observers)


@hookimpl
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register the launchers."""
    registry.add(
        LauncherSpec("local", "unidist_launch.launchers.local:LocalLauncher", "all ranks on this host (the default)")
    )
    registry.add(
        LauncherSpec(
            "elastic", "unidist_launch.launchers.elastic:ElasticLauncher", "ranks that come and go (--min-np, --max-np)"
        )
    )
    registry.add(LauncherSpec("ssh", "unidist_launch.launchers.ssh:SshLauncher", "ranks on the hosts of -H, by ssh"))


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register the commands."""
    for name, summary in _COMMANDS.items():
        registry.add(CommandSpec(name, f"unidist_launch.commands.{name}:{name}", summary))


_COMMANDS = {
    "launch": "Run a script, module or program on N processes.",
    "horovodrun": "Run a script of Horovod's, with horovodrun's flags.",
    "doctor": "Show what is installed and usable on this machine.",
    "plugin": "Begin a plugin: write a distribution whose tests pass.",
    "plugins": "List the plugins, what each registers, and problems.",
    "strategies": "List the strategies with their options.",
    "checkpoint": "Show, verify and convert checkpoints.",
    "build": "Build Horovod for the installed frameworks.",
}
