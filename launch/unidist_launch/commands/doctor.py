"""`unidist doctor`: what is installed and usable here, and what the environment asks for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
from typing import Any

import click

from unidist._version import __version__
from unidist.engine import Availability, EngineSpec
from unidist.errors import ConfigurationError, UnidistError
from unidist.framework import FrameworkSpec
from unidist.installation import damage
from unidist.launcher import LauncherSpec
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import HOROVOD_VARIABLES, Settings
from unidist.settings.placement import read_placement
from unidist_launch.display import machine
from unidist_launch.options.plugin_options import ExtendedCommand


@click.command(cls=ExtendedCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--deep", is_flag=True, help="Import each installed framework and its adapter too (takes seconds).")
def doctor(as_json: bool, deep: bool) -> int:
    """Show what is installed and usable on this machine: engines, frameworks, memory, environment."""
    logging.getLogger("unidist.plugins").setLevel(logging.ERROR)  # the table shows the problems
    problems = [text for text in [damage()] if text]
    try:
        disabled = Settings.read().disabled_plugins
        manager = PluginManager(disabled).load()
    except UnidistError as exc:
        problems.append(f"environment: {exc}")
        manager = PluginManager().load()
    facts: dict[str, Any] = {
        "versions": _versions(),
        "machine": _machine(),
        "engines": [_engine(spec) for spec in manager.engines],
        "frameworks": [_framework(spec, deep=deep) for spec in manager.frameworks],
        "launchers": [_launcher(spec) for spec in manager.launchers],
        "environment": _environment(),
        "placement": _placement(problems),
    }
    facts["problems"] = problems + manager.problems()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def _versions() -> dict[str, str]:
    return {
        "unidist": __version__,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "system": platform.platform(),
    }


def _environment() -> dict[str, str]:
    """Return what is set of our variables, and of those of Horovod's that are read."""
    is_read = (name for name in sorted(os.environ) if name.startswith("UNIDIST_") or name in HOROVOD_VARIABLES)
    return {name: os.environ[name] for name in is_read}


def _machine() -> dict[str, Any]:
    total, available = machine.memory_bytes()
    shared = machine.shared_memory_bytes()
    return {
        "cores": machine.usable_cores(),
        "memory_bytes": total,
        "memory_available_bytes": available,
        "container_memory_bytes": machine.container_memory_bytes(),
        "dev_shm_bytes": None if shared is None else shared[0],
        "dev_shm_free_bytes": None if shared is None else shared[1],
        "memfd": machine.has_memfd(),
        "gpus": machine.gpus(),
    }


def _engine(spec: EngineSpec) -> dict[str, Any]:
    return {"name": spec.name, "summary": spec.summary, "memory_kinds": sorted(spec.memory_kinds), **_try(spec)}


def _launcher(spec: LauncherSpec) -> dict[str, Any]:
    return {"name": spec.name, "summary": spec.summary, **_try(spec)}


def _try(spec: EngineSpec | LauncherSpec) -> dict[str, Any]:
    try:
        found = spec.load().availability()
    except Exception as exc:  # whatever a foreign engine raises: the doctor reports and goes on
        found = Availability(False, f"{type(exc).__name__}: {exc}")
    return {"usable": found.usable, "reason": found.reason}


def _without_native(spec: FrameworkSpec) -> str:
    module, loss = spec.native
    if not module or importlib.util.find_spec(module) is not None:
        return ""
    return f"; without {module}, which needs a C compiler when unidist is built, {loss}"


def _framework(spec: FrameworkSpec, *, deep: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": spec.name, "summary": spec.summary, "version": None}
    if importlib.util.find_spec(spec.requires) is None:
        return facts | {"usable": False, "reason": f"package {spec.requires!r} is not installed"}
    names = importlib.metadata.packages_distributions().get(spec.requires, [spec.requires])
    try:
        facts["version"] = importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        facts["version"] = "unknown"
    try:
        spec.check_version()
        if not deep:
            return facts | {"usable": True, "reason": f"{names[0]} {facts['version']}{_without_native(spec)}"}
        importlib.import_module(spec.requires)
        spec.load()
    except ConfigurationError as exc:
        return facts | {"usable": False, "reason": str(exc)}
    except Exception as exc:  # whatever a broken installation raises
        return facts | {"usable": False, "reason": f"{type(exc).__name__}: {exc}"}
    return facts | {"usable": True, "reason": f"{names[0]} {facts['version']}, imported"}


def _placement(problems: list[str]) -> dict[str, Any] | None:
    try:
        placement = read_placement()
    except UnidistError as exc:
        problems.append(f"environment: {exc}")
        return None
    topology = placement.topology
    return {
        "source": placement.source,
        "rank": topology.rank,
        "world_size": topology.world_size,
        "local_size": topology.local_size,
    }


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(show_header=False)
    for name, value in facts["versions"].items():
        table.add_row(name, escape(value))
    for name, text in _machine_lines(facts["machine"]):
        table.add_row(name, escape(text))
    for kind in ("engines", "frameworks", "launchers"):
        for item in facts[kind]:
            mark = "[green]usable[/green]" if item["usable"] else "[yellow]not usable[/yellow]"
            reason = f": {escape(item['reason'])}" if item["reason"] else ""
            table.add_row(f"{kind.removesuffix('s')} {item['name']}", f"{mark}{reason}")
    for name, value in facts["environment"].items():
        table.add_row(name, escape(value))
    place = facts["placement"]
    if place is not None:
        source = (
            "no launcher: one process"
            if place["source"] == "none"
            else f"rank {place['rank']} of {place['world_size']}, by {place['source']}"
        )
        table.add_row("this process", source)
    for problem in facts["problems"]:
        table.add_row("[red]problem[/red]", escape(problem))
    console.print(table)


def _machine_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    limit, size = found["container_memory_bytes"], found["dev_shm_bytes"]
    return [
        ("cores", str(found["cores"])),
        ("memory", f"{_gib(found['memory_available_bytes'])} of {_gib(found['memory_bytes'])} available"),
        ("container limit", "none" if limit is None else _gib(limit)),
        ("/dev/shm", "none" if size is None else f"{_gib(found['dev_shm_free_bytes'])} of {_gib(size)} free"),
        ("memfd", "yes" if found["memfd"] else "no: the shm engine and the launcher need it"),
        ("GPUs", "; ".join(found["gpus"]) or "none found (nvidia-smi)"),
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
