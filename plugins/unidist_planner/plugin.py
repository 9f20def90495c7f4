"""Registers the commands `unidist plan` and `unidist estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl

if TYPE_CHECKING:
    from click import Group


@hookimpl
def unidist_add_commands(cli: Group) -> None:
    """Add `unidist plan` and `unidist estimate`."""
    from unidist_planner.estimate_command import estimate
    from unidist_planner.plan_command import plan

    cli.add_command(plan)
    cli.add_command(estimate)
