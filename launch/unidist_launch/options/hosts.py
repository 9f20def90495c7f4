"""Which hosts a job runs on (`-H`, `--hostfile`), and which rank stands where. Pure, but for reading the file."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist.launcher import Host
from unidist.topology import Topology

# A name never begins with a dash: ssh would take it for an option.
_ENTRY = re.compile(r"((?:\w[\w.-]*@)?\w[\w.-]*):([1-9][0-9]*)")
_LINE = re.compile(r"((?:\w[\w.-]*@)?\w[\w.-]*)\s+slots\s*=\s*([1-9][0-9]*)")


def parse(text: str) -> tuple[Host, ...]:
    """Return the hosts of `-H h1:4,h2:4`, in that order; one that is named twice has the slots of both.

    Raises:
        ConfigurationError: it cannot be read.
    """
    entries = [_ENTRY.fullmatch(item.strip()) for item in text.split(",")]
    if None in entries:
        raise ConfigurationError(
            f"-H {text!r} cannot be read: write HOST:SLOTS,HOST:SLOTS, for example -H localhost:2."
        )
    return _merged([(entry[1], int(entry[2])) for entry in entries if entry is not None])


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file, a line for each: `h1 slots=4`. What follows a # is a comment.

    Raises:
        ConfigurationError: there is no such file, or a line of it cannot be read; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"--hostfile {str(path)!r} cannot be read: {exc}") from exc
    found = []
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        entry = _LINE.fullmatch(content)
        if entry is None:
            raise ConfigurationError(
                f"--hostfile {str(path)!r}, line {number}: {content!r} cannot be read; write HOST slots=NUMBER."
            )
        found.append((entry[1], int(entry[2])))
    if not found:
        raise ConfigurationError(f"--hostfile {str(path)!r} names no host; write a line HOST slots=NUMBER for each.")
    return _merged(found)


def used(hosts: Sequence[Host], num_proc: int) -> tuple[Host, ...]:
    """Return the hosts that get ranks, each with their number: they are filled in the order in which they are named.

    Raises:
        ConfigurationError: there are too few slots.
    """
    slots = sum(host.slots for host in hosts)
    if slots < num_proc:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigurationError(f"-np {num_proc} needs {num_proc} slots, but {listed} gives {slots}.")
    found = []
    left = num_proc
    for host in hosts:
        if left:
            found.append(Host(host.name, min(host.slots, left)))
            left -= found[-1].slots
    return tuple(found)


def places(hosts: Sequence[Host]) -> list[tuple[Topology, ...]]:
    """Return the places of all ranks, by host: each host's ranks are consecutive. `hosts` is a result of `used`."""
    world_size = sum(host.slots for host in hosts)
    found = []
    first = 0
    for node_rank, host in enumerate(hosts):
        found.append(
            tuple(
                Topology(first + local_rank, world_size, local_rank, host.slots, node_rank, len(hosts))
                for local_rank in range(host.slots)
            )
        )
        first += host.slots
    return found


def is_local(host: Host) -> bool:
    """Return whether a name is one of this host's own."""
    return host.name in own_names()


def check_local(hosts: Sequence[Host], launcher: str) -> None:
    """Check that a job names no other host than this one.

    Args:
        hosts: of the job; empty: this host.
        launcher: name of the launcher, for the message.

    Raises:
        ConfigurationError: it names another.
    """
    other = next((host.name for host in hosts if not is_local(host)), None)
    if other is not None:
        raise ConfigurationError(
            f"host {other!r} is not this one ({', '.join(own_names())}), and the launcher `{launcher}` starts ranks on "
            "this one only. Leave --launcher out, or use --launcher ssh."
        )


def own_names() -> list[str]:
    """Return the names by which this host is known to itself."""
    full = socket.gethostname()
    return list(dict.fromkeys(["localhost", "127.0.0.1", full, full.partition(".")[0]]))


def _merged(entries: Sequence[tuple[str, int]]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for name, number in entries:
        slots[name] = slots.get(name, 0) + number
    return tuple(Host(name, number) for name, number in slots.items())
