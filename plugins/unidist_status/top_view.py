"""The view of `unidist top` in a terminal."""

from __future__ import annotations

import re
import time
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_STYLES = {"training": "green", "up": "green", "lost": "red", "ended": "red"}
_NUM_EVENTS = 8
_MAX_COMMAND = 200


def view(fields: dict[str, Any], *, height: int | None = None) -> RenderableType:
    """Return what is shown.

    Args:
        fields: of `JobStatus.as_fields`.
        height: available lines; with fewer than it takes, ranks are left out. None: as many as it takes.
    """
    parts: list[RenderableType] = [_head(fields)]
    if fields["straggler"] is not None:
        slow = fields["straggler"]
        text = f"The others wait for rank {slow['rank']}: it works {slow['own_sec']:.3f} s per commit, they "
        parts.append(Text(f"{text}{slow['others_sec']:.3f} s.", style="yellow"))
    events = fields["events"][-_NUM_EVENTS:]
    room = None if height is None else max(3, height - len(fields["hosts"]) - len(events) - 16)
    parts += ["", _ranks(fields["ranks"], room, is_elastic=fields["is_elastic"]), "", _hosts(fields["hosts"]), ""]
    if fields["recovery"] is not None:
        parts += [_recovery(fields["recovery"]), ""]
    parts.append(_events(events))
    return Group(*parts)


def _plain(value: object) -> Text:
    """Return text without anything that a terminal would obey."""
    return Text(_CONTROL.sub("", str(value)))


def _head(fields: dict[str, Any]) -> Text:
    elapsed = int(fields["elapsed_sec"])
    clock = f"{elapsed // 3600}:{elapsed // 60 % 60:02}:{elapsed % 60:02}"
    words = [f"{fields['world_size']} ranks"]
    if fields["is_elastic"]:
        words.insert(0, f"generation {'-' if fields['generation'] < 0 else fields['generation']}")
        words += [f"commit {fields['commits']}", f"{fields['commits_per_sec']:.3g} commits/s"]
        words.append(f"{fields['num_changes']} changes")
    if fields["steps"] is not None:
        words += [f"step {fields['steps']}", f"{fields['steps_per_sec']:.3g} steps/s"]
    if fields["samples_per_sec"]:
        words.append(f"{fields['samples_per_sec']:.3g} samples/s")
    words += [f"{name} {float(value):.4g}" for name, value in fields["values"].items()]
    if fields["evaluation"] is not None:
        values = [f"{name} {value:.4g}" for name, value in fields["evaluation"]["values"].items()]
        words.append(f"checkpoint {fields['evaluation']['step']}: {', '.join(values)}")
    return Text.assemble(
        ("unidist ", "bold"),
        _plain(" ".join(fields["command"])[:_MAX_COMMAND]),
        f"\n{clock}  ",
        (fields["state"], _STYLES.get(fields["state"], "yellow")),
        "  ",
        _plain("  ".join(words)),
    )


def _table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    return table


def _ranks(ranks: list[dict[str, Any]], room: int | None, *, is_elastic: bool) -> Table:
    of_commits = ("commits", "work s", "wait s") if is_elastic else ()
    numbers = ("rank", "process", "step", "wait %", "data %", "MiB", *of_commits, "heard s")
    table = _table("rank", "state", "host", *numbers[1:], numbers=numbers)
    for rank in ranks[:room]:
        table.add_row(
            _number(rank["rank"], "d"),
            Text(rank["state"], _STYLES.get(rank["state"], "yellow")),
            _plain(rank["host"]),
            _number(rank["pid"] or None, "d"),
            _number(rank["steps"], "d"),
            _number(None if rank["waiting"] is None else 100 * rank["waiting"], ".0f"),
            _number(None if rank["reading"] is None else 100 * rank["reading"], ".0f"),
            _number(None if rank["memory_bytes"] is None else rank["memory_bytes"] / 2**20, ".0f"),
            *(
                [_number(rank["commits"], "d"), _number(rank["own_sec"], ".4f"), _number(rank["waited_sec"], ".4f")]
                if is_elastic
                else []
            ),
            _number(rank["heard_sec"], ".1f"),
        )
    if room is not None and len(ranks) > room:
        table.add_row("...", f"and {len(ranks) - room} more")
    return table


def _hosts(hosts: list[dict[str, Any]]) -> Table:
    table = _table("host", "state", "address", "cores", "processes", numbers=("cores", "processes"))
    for host in hosts:
        style = _STYLES.get(host["state"], "yellow")
        address = _plain(host["address"])
        table.add_row(
            _plain(host["name"]), Text(host["state"], style), address, str(host["cores"]), str(host["processes"])
        )
    return table


def _recovery(recovery: dict[str, Any]) -> Text:
    names = {
        "detect": "noticed within",
        "reform": "formed anew in",
        "restore": "restored in",
        "first_step": "first step in",
    }
    known = [(text, recovery[f"{name}_sec"]) for name, text in names.items()]
    phases = ", ".join(f"{text} {value:.3f} s" for text, value in known if value is not None)
    under_way = "" if recovery["is_complete"] else " (under way)"
    return Text.assemble("Last change: ", _plain(recovery["cause"]), f"{under_way}: {phases or '...'}")


def _events(events: list[dict[str, Any]]) -> Table:
    table = _table("time", "event", "what happened")
    table.columns[-1].no_wrap = False
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        table.add_row(clock, _plain(event["event"]), _plain(event["text"]))
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
