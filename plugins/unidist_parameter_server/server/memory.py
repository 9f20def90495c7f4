"""Finds out how much memory this process may still allocate."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes that are available on this host, or to this process's control group, if that is less."""
    found = [int(psutil.virtual_memory().available)]
    with suppress(OSError, ValueError):  # "max" is no number
        limit = int((_GROUP / "memory.max").read_text(encoding="ascii"))
        found.append(limit - int((_GROUP / "memory.current").read_text(encoding="ascii")))
    return max(0, min(found))


def in_units(count: int) -> str:
    """Return a number of bytes for a message: "1.5 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
