"""`-H HOST:SLOTS`, as horovodrun takes it: today the one host can only be this one."""

from __future__ import annotations

import re
import socket

from unidist.errors import ConfigurationError

_ENTRY = re.compile(r"([\w.-]+):([0-9]+)")


def check_hosts(text: str, num_proc: int) -> None:
    """Return if `text` names this host alone, with slots for all processes.

    Raises:
        ConfigurationError: it cannot be read, names another host, or has too few slots.
    """
    entries = [_ENTRY.fullmatch(item.strip()) for item in text.split(",")]
    if None in entries:
        raise ConfigurationError(f"-H {text!r} cannot be read: write HOST:SLOTS, for example -H localhost:{num_proc}.")
    own = own_names()
    slots = 0
    for entry in entries:
        assert entry is not None
        if entry[1] not in own:
            raise ConfigurationError(
                f"-H {text!r}: host {entry[1]!r} is not this one ({', '.join(own)}). Several hosts: not yet; "
                "all ranks run on this host. Start the processes with mpirun or srun, under which init() works."
            )
        slots += int(entry[2])
    if slots < num_proc:
        raise ConfigurationError(f"-np {num_proc} needs {num_proc} slots, but -H {text!r} gives {slots}.")


def own_names() -> list[str]:
    """Return the names by which this host is known to itself."""
    full = socket.gethostname()
    return list(dict.fromkeys(["localhost", "127.0.0.1", full, full.partition(".")[0]]))
