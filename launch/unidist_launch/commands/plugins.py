"""`unidist plugins`: what is found, where it comes from, what it registers, what is wrong with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import click

from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginInfo, PluginManager
from unidist.settings.environment import Settings

_REGISTERS = "unidist_register_"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--check", is_flag=True, help="Look for private names too, imported or attributes, which a release may move."
)
def plugins(as_json: bool, check: bool) -> int:
    """List the plugins, what each registers, and problems. Exit code 1 when there is a problem."""
    logging.getLogger("unidist.plugins").setLevel(logging.ERROR)  # the table shows the problems
    settings = Settings.read()
    manager = PluginManager(settings.disabled_plugins).load()
    found = [_describe(info, manager) for info in _all(manager)]
    if check:
        from unidist_launch.commands.private_names import private_names

        for item in found:
            item["notes"] = private_names(item["name"], item["distribution"])
    if as_json:
        click.echo(json.dumps({"plugins": found, "disabled": sorted(manager.disabled)}, indent=2))
    else:
        _print_table(found, _registries(manager), sorted(manager.disabled))
    return 1 if any(item["problems"] for item in found) else 0


def _all(manager: PluginManager) -> list[PluginInfo]:
    # The registries fill when asked for, and only then are problems of registering known.
    for registry in _registries(manager).values():
        len(registry)
    return list(manager.plugins.values())


def _registries(manager: PluginManager) -> dict[str, Registry[Any]]:
    """Return the registry of every kind of plugins, by the kind in the plural, as its hook names it."""
    return {kind.hook.removeprefix(_REGISTERS): manager.registry(kind) for kind in manager.kinds}


def _describe(info: PluginInfo, manager: PluginManager) -> dict[str, Any]:
    registered = {
        kind: [spec.name for spec in registry if registry.origin_of(spec.name) == info.origin]
        for kind, registry in _registries(manager).items()
    }
    hooks = [hook for hook in manager.hooks_of(info.name) if not hook.startswith(_REGISTERS)]
    return {
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        **registered,
        "hooks": hooks,
        "problems": list(info.problems),
    }


def _print_table(found: list[dict[str, Any]], kinds: Iterable[str], disabled: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table("plugin", "distribution", "registers")
    for item in found:
        lines = [f"{kind}: {', '.join(item[kind])}" for kind in (*kinds, "hooks") if item[kind]]
        lines += [f"[red]problem: {escape(problem)}[/red]" for problem in item["problems"]]
        lines += [f"note: {escape(note)}" for note in item.get("notes", ())]
        table.add_row(escape(item["name"]), escape(f"{item['distribution']} {item['version']}"), "\n".join(lines))
    console.print(table)
    if disabled:
        console.print(f"disabled by UNIDIST_DISABLE_PLUGINS: {', '.join(disabled)}")
