"""Options under headings."""

from __future__ import annotations

import click
from click.testing import CliRunner

from unidist_launch.commands.launch import launch
from unidist_launch.display.grouped_help import GroupedCommand, GroupedOption


@click.command(cls=GroupedCommand)
@click.option("--length", cls=GroupedOption, group="Size", aliases=("--long",), help="How long.")
@click.option("--ripe/--unripe", cls=GroupedOption, group="Taste", aliases=("--sweet/--sour",), help="Ready to eat.")
@click.option("--width", cls=GroupedOption, group="Size", help="How wide.")
@click.option("--secret", is_flag=True, hidden=True)
@click.option("--plain", is_flag=True, help="Without a heading.")
@click.argument("name", required=False)
def banana(length: str, ripe: bool, width: str, secret: bool, plain: bool, name: str) -> None:
    click.echo(f"{length} {ripe} {width}")


def test_help_lists_options_by_heading_and_leaves_out_what_is_hidden() -> None:
    text = CliRunner().invoke(banana, ["--help"]).output
    parts = ["Size:", "--length TEXT", "--width TEXT", "Taste:", "--ripe / --unripe", "Other:", "--plain", "--help"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert not [name for name in ("--long ", "--sweet", "--sour", "--secret") if name in text]


def test_aliases_work() -> None:
    assert CliRunner().invoke(banana, ["--long", "3", "--sour", "--width", "2"]).output == "3 False 2\n"
    assert CliRunner().invoke(banana, ["--sweet"]).output == "None True None\n"


def test_every_option_of_launch_has_a_heading_or_is_about_the_command_itself() -> None:
    shown = [item for item in launch.params if isinstance(item, click.Option) and not item.hidden]
    assert [item.name for item in shown if not isinstance(item, GroupedOption)] == ["check_build", "version"]
