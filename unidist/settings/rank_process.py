"""Reports of a rank to the process that started it, in inherited memory: which process it is, and its progress.

A wrapper (a shell, a profiler) may stand in between.

What starts ranks needs to know it for signals. A signal to a rank's whole process group also reaches the rank's own
children, which may not outlive it: PyTorch's DataLoader fails if a worker dies before the rank has ended in order.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from unidist.settings.inherited import path_of_inherited

_PID = struct.Struct("=i")
_REPORT = struct.Struct("=II")  # length and checksum, of JSON that follows
_REPORT_AT = _PID.size
_MAX_REPORT_BYTES = 64 << 10
_NAME = "unidist-process"
PROCESS_VARIABLE = "UNIDIST_PROCESS_FD"


class RankProcess:
    """The launcher's end: memory that one rank inherits, and in which it writes its process id.

    Attributes:
        fd: the descriptor to hand on, under the same number, with its number in `PROCESS_VARIABLE`.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._last = b""

    @property
    def has_announced(self) -> bool:
        """Whether the rank has told its process id, which it does in `init()`; it may have ended since."""
        return os.fstat(self.fd).st_size > 0

    def pid(self, leader: int) -> int:
        """Return the rank's process id; 0 if it has not told it, or that process has ended.

        Args:
            leader: process id of the session in which the rank runs.
        """
        data = os.pread(self.fd, _PID.size, 0)
        if len(data) < _PID.size:
            return 0
        pid: int = _PID.unpack(data)[0]
        try:
            return pid if os.getsid(pid) == leader else 0
        except OSError:  # it has ended
            return 0

    def new_report(self) -> dict[str, Any] | None:
        """Return the rank's last progress report; None if it has written none since the last call."""
        data = os.pread(self.fd, _REPORT.size + _MAX_REPORT_BYTES, _REPORT_AT)
        if len(data) < _REPORT.size or data == self._last:
            return None
        length, checksum = _REPORT.unpack_from(data)
        text = data[_REPORT.size : _REPORT.size + length]
        if zlib.crc32(text) != checksum:  # it is being written
            return None
        self._last = data
        try:
            found = json.loads(text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Release the descriptor. To be called once."""
        os.close(self.fd)


class ReportMemory:
    """The rank's end, for its progress reports.

    Args:
        fd: of the memory; closed by `close`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def inherited(cls, environ: Mapping[str, str] | None = None) -> ReportMemory | None:
        """Return the memory that this rank's launcher reads; None if there is none."""
        fd = _open_inherited(os.environ if environ is None else environ)
        return None if fd is None else cls(fd)

    def write(self, report: Mapping[str, Any]) -> None:
        """Replace the report. The reader passes over one that is half written."""
        text = json.dumps(report).encode()
        if len(text) <= _MAX_REPORT_BYTES:
            os.pwrite(self._fd, _REPORT.pack(len(text), zlib.crc32(text)) + text, _REPORT_AT)

    def close(self) -> None:
        """Release the descriptor. To be called once."""
        os.close(self._fd)


def announce_rank_process(environ: Mapping[str, str] | None = None) -> bool:
    """Tell what started this rank that this process is the rank; called by `init()`.

    Returns whether somebody asked.
    """
    descriptor = _open_inherited(os.environ if environ is None else environ)
    if descriptor is None:  # a wrapper has closed it, and the launcher is out of reach: signals go to the whole group
        return False
    try:
        os.pwrite(descriptor, _PID.pack(os.getpid()), 0)
    finally:
        os.close(descriptor)
    return True


def _open_inherited(env: Mapping[str, str]) -> int | None:
    path = path_of_inherited(env, PROCESS_VARIABLE, _NAME)
    if path is None:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
