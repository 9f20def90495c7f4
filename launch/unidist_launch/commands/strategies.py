"""`unidist strategies`: which strategies there are, what they take, and which go together."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from unidist.strategy.composition import DescribedStrategy, Pair


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def strategies(names: tuple[str, ...], as_json: bool) -> int:
    """List the strategies with their options, and which of them go together.

    With NAMES only these, and what they go together with. What goes together is tried out: each pair is checked as
    `unidist launch` would check it, with 1 to 8 ranks.
    """
    from unidist.strategy.composition import described, pairs

    manager = PluginManager(Settings.read().disabled_plugins).load()
    for name in names:
        manager.strategies.get(name)  # or an error that lists the choices
    found = described(manager)
    tried = [pair for pair in pairs(found, manager) if not names or _names(pair) & set(names)]
    shown = [item for item in found if not names or item.name in names]
    if as_json:
        click.echo(
            json.dumps({"strategies": [asdict(x) for x in shown], "pairs": [asdict(x) for x in tried]}, indent=2)
        )
    else:
        _print(shown, tried, names)
    return 0


def _names(pair: Pair) -> set[str]:
    return {pair.first.partition("=")[0], pair.second.partition("=")[0]}


def _print(shown: list[DescribedStrategy], tried: list[Pair], names: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    for item in shown:
        console.print()
        axis = f", mesh axis {item.axis}" if item.axis else ""
        console.print(
            f"[bold]{item.name}[/bold]: {escape(item.summary)} ({escape(item.plugin)}{axis})", highlight=False
        )
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for option in item.options:
            written = f"{item.name}=" if not option.name else f"  :{option.name}="
            default = "" if option.default is None else f"[{option.default}]" if option.default else ""
            table.add_row(f"  {written}{option.type}", escape(default), escape(option.help))
        console.print(table)
    console.print()
    _print_pairs(console, tried, names)


def _print_pairs(console: Console, tried: list[Pair], names: tuple[str, ...]) -> None:
    from rich.markup import escape
    from rich.table import Table

    items = list(dict.fromkeys(name for pair in tried for name in (pair.first, pair.second)))
    errors = list(dict.fromkeys(pair.error for pair in tried if pair.error))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title="what does not go together, and why")
    table.title_justify = "left"
    table.add_column(no_wrap=True)
    for row in items:
        if names and row.partition("=")[0] not in names:
            continue
        refused = [
            f"{pair.second if pair.first == row else pair.first} [red]{_mark(errors.index(pair.error))}[/red]"
            for pair in tried
            if pair.error and row in (pair.first, pair.second)
        ]
        table.add_row(row, f"not with {', '.join(refused)}" if refused else "with every other one")
    console.print(table)
    for number, error in enumerate(errors):
        console.print(f"[red]{_mark(number)}[/red]: {escape(error)}", highlight=False, soft_wrap=True)


def _mark(number: int) -> str:
    """Return a, b, ..., z, a2, b2, ... for 0, 1, ..."""
    lap, letter = divmod(number, 26)
    return chr(ord("a") + letter) + (str(lap + 1) if lap else "")
