"""Registers the command `unidist top`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl

if TYPE_CHECKING:
    from click import Group


@hookimpl
def unidist_add_commands(cli: Group) -> None:
    """Add `unidist top`."""
    from unidist_status.top_command import top

    cli.add_command(top)
