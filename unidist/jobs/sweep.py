"""Finds every process of a job and kills it; run as a program, it is the job's watchdog.

    python -I -S sweep.py PARENT_PID JOB_ID < PIPE

The parent (launcher or pool) holds the pipe's other end and writes one line `PID START_TIME` for each rank.
When the pipe ends, for whatever reason, the watchdog kills what is left of the job and exits: 0 when
nothing is left. One path serves the normal end and the kill -9 of the parent, so it is always tested.

A process belongs to the job when it is in the session of a rank (children of a shell wrapper, also with a
cleared environment) or has the job's id in its environment (also after setsid).

Only light modules of the standard library are imported: the program must be up in milliseconds, and must
not need the parent's `sys.path`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping

JOB_ID_VARIABLE = "UNIDIST_JOB_ID"
_GIVE_UP_SEC = 10.0
_PARENT_CHECK_MS = 500


def start_time(pid: int) -> int:
    """Return when process `pid` started, in clock ticks since boot: with the pid, it names a process for ever.

    Raises:
        ProcessLookupError: there is no such process.
    """
    found = _stat(pid)
    if found is None:
        raise ProcessLookupError(pid)
    return found[2]


def is_stopped(pid: int) -> bool:
    """Return whether process `pid` is stopped by a signal, and so does nothing until it gets SIGCONT."""
    found = _stat(pid)
    return found is not None and found[0] == "T"


def find_processes(job_id: str, leaders: Mapping[int, int]) -> list[int]:
    """Return the living processes of a job, apart from this process.

    Args:
        job_id: the job's UNIDIST_JOB_ID.
        leaders: start time by pid of the ranks, each the leader of a session.
    """
    stats = {pid: stat for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (stat := _stat(pid))}
    marker = f"\0{JOB_ID_VARIABLE}={job_id}\0".encode()
    found = []
    for pid, (state, session, _) in stats.items():
        if state in "ZX" or pid == os.getpid():
            continue
        # Without its leader a session keeps its number from reuse; with one, the start time tells whose it is.
        in_session = session in leaders and (session not in stats or stats[session][2] == leaders[session])
        if in_session or marker in _environment(pid):
            found.append(pid)
    return found


def kill_processes(job_id: str, leaders: Mapping[int, int]) -> bool:
    """Kill with SIGKILL until a search finds nothing; False if something is still there after ten seconds."""
    deadline = time.monotonic() + _GIVE_UP_SEC
    while found := find_processes(job_id, leaders):
        if time.monotonic() > deadline:
            return False
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.005)
    return True


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return state, session and start time of a process, None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (fields[0].decode(), int(fields[3]), int(fields[19])) if len(fields) > 19 else None


def _environment(pid: int) -> bytes:
    """Return a process's environment between zero bytes; empty for other users' processes."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read() + b"\0"
    except OSError:
        return b""


def _wait_for_parent(parent: int) -> bytes:
    """Return what the parent wrote, when the pipe ends or the parent is gone."""
    written = bytearray()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        if poll.poll(_PARENT_CHECK_MS):
            data = os.read(0, 65536)
            if not data:
                return bytes(written)
            written += data
        elif os.getppid() != parent:  # a forked copy of the parent holds the pipe open
            return bytes(written)


def _main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, job_id = int(sys.argv[1]), sys.argv[2]
    lines = _wait_for_parent(parent).decode().split("\n")[:-1]
    leaders = {int(pid): int(start) for pid, start in (line.split() for line in lines)}
    clean = kill_processes(job_id, leaders)
    if os.getppid() != parent:
        time.sleep(0.2)  # a child that the parent had just forked carries the job's id only after its exec
        clean = kill_processes(job_id, leaders)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(_main())
