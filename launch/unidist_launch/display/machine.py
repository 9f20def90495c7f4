"""Facts about this machine, for `unidist doctor`. Each function takes milliseconds and imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

_PROBE_SEC = 10.0


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> tuple[int, int]:
    """Return the machine's memory, total and available."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def shared_memory_bytes() -> tuple[int, int] | None:
    """Return size and free space of /dev/shm; None if there is none.

    The shm engine does not need it; others do.
    """
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def has_memfd() -> bool:
    """Return whether anonymous shared memory can be made, which the shm engine and the launcher use."""
    try:
        os.close(os.memfd_create("unidist-doctor"))
    except OSError:
        return False
    return True


def container_memory_bytes() -> int | None:
    """Return the smallest memory limit of this process's control groups; None if there is none."""
    limits = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):  # a limit holds for all that is below it
            text = _read(place / name).strip()
            if text.isdigit():
                limits.append(int(text))
            if place == root:
                break
    total, _ = memory_bytes()
    return min((limit for limit in limits if limit < total), default=None)


def gpus() -> list[str]:
    """Return name, memory and driver of each NVIDIA GPU, as its own tool tells them; empty without the tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(query, capture_output=True, text=True, timeout=_PROBE_SEC, check=True)
        return [line.strip() for line in found.stdout.splitlines() if line.strip()]
    return []


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
