"""The launcher's screen: prefixed lines of the ranks, its own messages, and one live line on a terminal."""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache

from unidist_launch.output.lines import Folded, Stream, rank_label

_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")
_ERASE = b"\r\x1b[K"
_LOOK_SEC = 0.1
_PATIENCE_SEC = 1.0
_UNREAD_SEC = 60.0
_OTHER = {Stream.STDOUT: Stream.STDERR, Stream.STDERR: Stream.STDOUT}
_NAMES = {Stream.STDOUT: "standard output", Stream.STDERR: "standard error"}


class Screen:
    """Writes to this process's standard output and error.

    Lines of ranks begin with "[RANK] ", on standard error with "[RANK!] "; on a terminal each rank has its
    colour. The live line is shown on standard error if that is a terminal, and is gone before any other line.

    While a reader does not read (a full pipe), writing waits, and so do ranks that print more than the launcher
    takes. After a minute the other stream says so, if it is read.

    Args:
        timestamps: lines of ranks begin with the local time at which they are shown, in milliseconds.
        give_up: asked while the reader of our output does not read; True drops what is left.
        drop_unread: lines that a reader leaves unread for a second are dropped, and counted, instead.
    """

    def __init__(self, *, timestamps: bool = False, give_up: Callable[[], bool], drop_unread: bool = False) -> None:
        self._timestamps = timestamps
        self._give_up = give_up
        self._drop_unread = drop_unread
        # What was not read: the rest of the line at which the reader stopped, and how many lines were dropped.
        self._unread: dict[Stream, tuple[bytes, int]] = {}
        self._terminals = {stream for stream in Stream if os.isatty(stream)}
        self._live = ""
        self._buffer = bytearray()
        self._buffer_stream = Stream.STDOUT
        self.failures: dict[Stream, OSError] = {}
        """Streams that can no longer be written to, and why."""
        self._prefix = lru_cache(maxsize=1024)(self._make_prefix)

    @property
    def is_live(self) -> bool:
        """Return whether a live line can be shown."""
        return Stream.STDERR in self._terminals and os.environ.get("TERM") != "dumb"

    def line(self, folded: Folded) -> None:
        """Take one line of some ranks. It appears at the next `flush`."""
        prefix = self._prefix(folded.ranks, folded.stream)
        if self._timestamps:
            prefix = datetime.now().isoformat(" ", "milliseconds").encode() + b" " + prefix
        text = folded.line.removesuffix(b"\r")
        if b"\r" in text:  # frames of a progress bar: each one overwrites the last, prefix and all
            if folded.stream in self._terminals:
                text = text.replace(b"\r", b"\r" + prefix)
            else:
                text = next((frame for frame in reversed(text.split(b"\r")) if frame.strip()), b"")
        self._add(folded.stream, prefix + text + b"\n")

    def message(self, text: str) -> None:
        """Take one of the launcher's own messages, of any number of lines, for standard error."""
        self._add(Stream.STDERR, text.encode(errors="replace") + b"\n")

    def live(self, text: str) -> None:
        """Show `text` as the live line; empty removes it."""
        if not self.is_live or text == self._live:
            return
        self.flush()
        self._erase()
        if text:
            from rich.cells import set_cell_size

            clean = _ESCAPES.sub("", text)
            try:
                columns = (os.get_terminal_size(Stream.STDERR).columns or 80) - 1
            except OSError as exc:  # it has been closed
                self.failures[Stream.STDERR] = exc
                return
            self._write(Stream.STDERR, set_cell_size(clean, columns).rstrip().encode(errors="replace"))
        self._live = text

    def flush(self) -> None:
        """Write what was taken."""
        if self._buffer:
            if self._buffer_stream in self._terminals:
                self._erase()
            data, self._buffer = self._buffer, bytearray()
            self._write(self._buffer_stream, data)

    def _erase(self) -> None:
        if self._live:
            self._write(Stream.STDERR, _ERASE)
            self._live = ""

    def _add(self, stream: Stream, data: bytes) -> None:
        # Both streams may be one file: change over only after the other's lines are out.
        if stream is not self._buffer_stream:
            self.flush()
            self._buffer_stream = stream
        self._buffer += data
        if len(self._buffer) > 1 << 16:
            self.flush()

    def close(self) -> None:
        """Say on the other stream how many lines a reader who never came back has missed."""
        for stream, (_, num_lines) in list(self._unread.items()):
            other = _OTHER[stream]
            if num_lines and other not in self._unread and _takes_data(other, 0):
                del self._unread[stream]
                self._write(other, _dropped_line(stream, num_lines))

    def _write(self, stream: Stream, data: bytes | bytearray) -> None:
        if stream in self._unread:
            begun, num_lines = self._unread[stream]
            if not _takes_data(stream, 0):
                self._unread[stream] = (begun, num_lines + data.count(b"\n"))
                return
            del self._unread[stream]
            data = begun + _dropped_line(stream, num_lines) + data
        view = memoryview(data)
        stalled_at, is_told = time.monotonic(), False
        while view and stream not in self.failures:
            if not _takes_data(stream, _LOOK_SEC):
                stalled_sec = time.monotonic() - stalled_at
                if self._give_up():
                    return
                if self._drop_unread and stalled_sec > _PATIENCE_SEC:
                    self._drop(stream, bytes(data), len(data) - len(view))
                    return
                if not is_told and stalled_sec > _UNREAD_SEC:
                    is_told = True
                    self._tell_unread(stream)
                continue
            try:
                # A pipe that polls writable takes PIPE_BUF bytes without blocking.
                view = view[os.write(stream, view[: select.PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except OSError as exc:
                self.failures[stream] = exc
            stalled_at = time.monotonic()

    def _drop(self, stream: Stream, data: bytes, written: int) -> None:
        """Keep no more than the rest of the line at which the reader stopped."""
        end = written
        if written and data[written - 1 : written] != b"\n":
            end = data.find(b"\n", written) + 1 or len(data)
        self._unread[stream] = (data[written:end], data.count(b"\n", end))

    def _tell_unread(self, stream: Stream) -> None:
        if _takes_data(_OTHER[stream], 0):
            text = (
                f"unidist: {_NAMES[stream]} has not been read for {_UNREAD_SEC:.0f} seconds. Ranks that print more "
                "wait until it is; --drop-unread-output drops lines instead.\n"
            )
            self._write(_OTHER[stream], text.encode())

    def _make_prefix(self, ranks: tuple[int, ...], stream: Stream) -> bytes:
        text = f"[{rank_label(ranks)}{'!' if stream is Stream.STDERR else ''}]"
        color = _COLORS[ranks[0] % len(_COLORS)] if len(ranks) == 1 else "white"
        return self._styled(stream, text, f"bold {color}" if stream is Stream.STDERR else color).encode() + b" "

    def _styled(self, stream: Stream, text: str, style: str) -> str:
        if stream not in self._terminals:
            return text
        from rich.console import Console
        from rich.style import Style

        console = Console(file=sys.stdout if stream is Stream.STDOUT else sys.stderr)
        return Style.parse(style).render(text, color_system=console._color_system)


def _takes_data(stream: Stream, seconds: float) -> bool:
    """Wait for a stream to take data; returns whether it does."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return bool(poll.poll(1000 * seconds))


def _dropped_line(stream: Stream, num_lines: int) -> bytes:
    return f"unidist: {num_lines} lines were dropped, as {_NAMES[stream]} was not read\n".encode() if num_lines else b""


def is_broken_pipe(error: OSError) -> bool:
    """Return whether the reader of our output went away, as `head` does."""
    return error.errno == errno.EPIPE
