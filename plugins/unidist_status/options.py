"""The options of the status page, which `unidist launch` takes while this plugin is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unidist.errors import ConfigurationError
from unidist_launch.display.grouped_help import GroupedOption
from unidist_launch.options.numbers import Whole

if TYPE_CHECKING:
    from unidist.runtime import PluginManager
    from unidist_status.board import StatusBoard


@dataclass(frozen=True)
class StatusPage:
    """Settings of a status page.

    Args:
        port: to listen on; 0: any that is free.
        address: of this host, to listen on.
        token_file: holds the token that clients have to know; None: a random one, shown once.
        file: where other commands of this user find address and token; None: in the user's runtime folder.
    """

    port: int
    address: str = "127.0.0.1"
    token_file: Path | None = None
    file: Path | None = None


_GROUP = "What is shown and kept"


def _option(name: str, **attributes: Any) -> click.Option:
    return GroupedOption([name], group=_GROUP, **attributes)


OPTIONS = (
    _option(
        "--status-port",
        type=Whole(min=0, max=65535),
        metavar="PORT",
        help="Show the job on a web page, in `unidist top` and to Prometheus (0: any free port; default: not at all).",
    ),
    _option("--status-address", metavar="ADDRESS", help="Address of this host for that (default: 127.0.0.1)."),
    _option(
        "--status-token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Holds the token that the page asks for; mode 600 (default: a random one, printed once).",
    ),
    _option(
        "--status-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Where `unidist top` finds address and token (default: a file in the runtime folder of the user).",
    ),
)


def observer(options: Mapping[str, Any], is_elastic: bool, plugins: PluginManager) -> StatusBoard:
    """Return what watches a job.

    Raises:
        ConfigurationError: the options contradict each other.
    """
    from unidist_status.board import StatusBoard

    return StatusBoard(page(options), is_elastic=is_elastic)


def page(options: Mapping[str, Any]) -> StatusPage | None:
    """Return the page that the options ask for; None: none.

    Raises:
        ConfigurationError: options of a page without a port.
    """
    if options["status_port"] is None:
        given = next((name for name, value in options.items() if value is not None), None)
        if given is not None:
            raise ConfigurationError(f"--{given.replace('_', '-')} is for the status page; give --status-port too.")
        return None
    return StatusPage(
        options["status_port"],
        address=options["status_address"] or StatusPage.address,
        token_file=options["status_token_file"],
        file=options["status_file"],
    )
