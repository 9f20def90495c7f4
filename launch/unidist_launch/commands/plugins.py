"""`unidist plugins`: what is found, where it comes from, what it registers, what is wrong with it."""

from __future__ import annotations

import json
import logging
from typing import Any

import click

from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginInfo, PluginManager
from unidist.settings.environment import Settings

_REGISTERS = "unidist_register_"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(as_json: bool) -> int:
    """List the plugins, what each registers, and problems. Exit code 1 when there is a problem."""
    logging.getLogger("unidist.runtime.plugin_manager").setLevel(logging.ERROR)  # the table shows the problems
    settings = Settings.read()
    manager = PluginManager(settings.disabled_plugins).load()
    found = [_describe(info, manager) for info in _all(manager)]
    if as_json:
        click.echo(json.dumps({"plugins": found, "disabled": sorted(manager.disabled)}, indent=2))
    else:
        _print_table(found, sorted(manager.disabled))
    return 1 if any(item["problems"] for item in found) else 0


def _all(manager: PluginManager) -> list[PluginInfo]:
    # The registries fill when asked for, and only then are problems of registering known.
    for registry in _registries(manager).values():
        len(registry)
    return list(manager.plugins.values())


def _registries(manager: PluginManager) -> dict[str, Registry[Any]]:
    return {
        "engines": manager.engines,
        "frameworks": manager.frameworks,
        "strategies": manager.strategies,
        "compressors": manager.compressors,
        "schedules": manager.schedules,
        "launchers": manager.launchers,
    }


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


def _print_table(found: list[dict[str, Any]], disabled: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table("plugin", "distribution", "registers")
    for item in found:
        kinds = ("engines", "frameworks", "strategies", "compressors", "schedules", "launchers", "hooks")
        lines = [f"{kind}: {', '.join(item[kind])}" for kind in kinds if item[kind]]
        lines += [f"[red]problem: {escape(problem)}[/red]" for problem in item["problems"]]
        table.add_row(escape(item["name"]), escape(f"{item['distribution']} {item['version']}"), "\n".join(lines))
    console.print(table)
    if disabled:
        console.print(f"disabled by UNIDIST_DISABLE_PLUGINS: {', '.join(disabled)}")
