"""`unidist top`: what a job's status page shows, in a terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import click

from unidist.errors import ConfigurationError
from unidist_launch.options.numbers import Real
from unidist_status import file as status_file
from unidist_status.file import StatusAddress

_ANSWER_SEC = 5.0
_MAX_BYTES = 32 << 20


class _UnreachableError(ConfigurationError):
    """Nobody answers there."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("url", required=False)
@click.option(
    "--status-file",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of the job, where it was launched with one (default: the one job of yours on this host).",
)
@click.option("--once", is_flag=True, help="Print the state once, and end.")
@click.option(
    "--interval",
    type=Real(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one look to the next.",
)
def top(url: str | None, file: Path | None, once: bool, interval: float) -> int:
    """Show an elastic job that was launched with --status-port: ranks, hosts, steps, events.

    URL is the address that the launcher has printed, with its token. Without one, the job is found by the small
    file that its launcher writes for its user. It ends with the job, or by Ctrl-C.
    """
    address = _address(url, file)
    fields = _fetch(address)
    from rich.console import Console

    from unidist_status.top_view import view

    console = Console()
    if once:
        console.print(view(fields))
        return 0
    _follow(address, fields, interval, console)
    return 0


def _follow(address: StatusAddress, fields: dict[str, Any], interval: float, console: Any) -> None:
    from rich.live import Live

    from unidist_status.top_view import view

    with Live(view(fields, height=console.height), console=console, auto_refresh=False, screen=False) as live:
        while True:
            try:
                time.sleep(interval)
                fields = _fetch(address)
            except _UnreachableError:
                break
            except KeyboardInterrupt:
                return
            live.update(view(fields, height=console.height), refresh=True)
    console.print("unidist: the launcher does not answer any more: the job has ended.")


def _address(url: str | None, file: Path | None) -> StatusAddress:
    """Return where to ask.

    Raises:
        ConfigurationError: there is no such job, or there are several.
    """
    if url is not None and file is not None:
        raise ConfigurationError("URL and --status-file exclude each other; give one of them.")
    if file is not None:
        return status_file.read(file)
    if url is not None:
        parts = urlsplit(url)
        tokens = parse_qs(parts.query).get("token", [])
        if parts.scheme != "http" or not parts.netloc or len(tokens) != 1:
            raise ConfigurationError(
                f"{url!r} is no address of a status page: it looks like http://127.0.0.1:41873/?token=..., and "
                "`unidist launch --status-port` prints it"
            )
        return StatusAddress(urlunsplit((parts.scheme, parts.netloc, "/", "", "")), tokens[0])
    jobs = status_file.running_jobs()
    if not jobs:
        raise ConfigurationError(
            f"no job of yours on this host shows its status (there is none in {str(status_file.runtime_folder())!r}). "
            "Launch one with --status-port 0, or give the address that its launcher has printed."
        )
    if len(jobs) > 1:
        listed = "\n".join(f"  {job.full_url}  {' '.join(job.command)}" for job in jobs)
        raise ConfigurationError(f"{len(jobs)} jobs of yours show their status; give the address of one:\n{listed}")
    return jobs[0]


def _fetch(address: StatusAddress) -> dict[str, Any]:
    """Return the job's status.

    Raises:
        ConfigurationError: the answer is none of a status page, or the token is not its.
    """
    request = urllib.request.Request(f"{address.url}status.json", headers={"Authorization": f"Bearer {address.token}"})
    # No proxy of the environment gets to see the token.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_SEC) as answer:
            text = answer.read(_MAX_BYTES)
            if answer.length and len(text) < _MAX_BYTES:
                raise _UnreachableError(f"{address.url} has broken off its answer. Has the job ended?")
            fields = json.loads(text)
    except urllib.error.HTTPError as exc:
        if exc.code == 401:
            raise ConfigurationError(f"{address.url} does not know this token; is it that of another job?") from exc
        raise ConfigurationError(f"{address.url} answers {exc.code} {exc.reason}") from exc
    except OSError as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise _UnreachableError(f"{address.url} does not answer: {reason}. Has the job ended?") from exc
    except ValueError as exc:
        raise ConfigurationError(f"{address.url} is no status page of a job") from exc
    if not isinstance(fields, dict) or "ranks" not in fields:
        raise ConfigurationError(f"{address.url} is no status page of a job")
    return fields
