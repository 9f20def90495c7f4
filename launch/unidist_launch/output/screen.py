"""The launcher's screen: prefixed lines of the ranks, its own messages, and one live line on a terminal."""

from __future__ import annotations

import errno
import os
import re
import select
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache

from unidist_launch.output.lines import Folded, Stream, rank_label

_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")
_ERASE = b"\r\x1b[K"


class Screen:
    """Writes to this process's standard output and error, without ever blocking for good.

    Lines of ranks begin with "[RANK] ", on standard error with "[RANK!] "; on a terminal each rank has its
    colour. The live line is shown on standard error if that is a terminal, and is gone before any other line.

    Args:
        timestamps: lines of ranks begin with the local time at which they are shown, in milliseconds.
        give_up: asked while the reader of our output does not read; True drops what is left.
    """

    def __init__(self, *, timestamps: bool = False, give_up: Callable[[], bool]) -> None:
        self._timestamps = timestamps
        self._give_up = give_up
        self._terminals = {stream for stream in Stream if os.isatty(stream)}
        self._live = ""
        self._buffer = bytearray()
        self._buffer_stream = Stream.STDOUT
        self.failures: dict[Stream, OSError] = {}
        """Streams that can no longer be written to, and why."""
        self._prefix = lru_cache(maxsize=1024)(self._make_prefix)

    @property
    def is_live(self) -> bool:
        """Say whether a live line can be shown."""
        return Stream.STDERR in self._terminals and os.environ.get("TERM") != "dumb"

    def line(self, folded: Folded) -> None:
        """Take one line of some ranks. It appears at the next `flush`."""
        prefix = self._prefix(folded.ranks, folded.stream)
        if self._timestamps:
            prefix = datetime.now().isoformat(" ", "milliseconds").encode() + b" " + prefix
        text = folded.line.removesuffix(b"\r")
        if b"\r" in text:  # frames of a progress bar: each one overwrites the last, prefix and all
            text = text.replace(b"\r", b"\r" + prefix)
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

    def _write(self, stream: Stream, data: bytes | bytearray) -> None:
        view = memoryview(data)
        poll = select.poll()
        poll.register(stream, select.POLLOUT)
        while view and stream not in self.failures:
            if not poll.poll(100):
                if self._give_up():
                    return
                continue
            try:
                # A pipe that polls writable takes PIPE_BUF bytes without blocking.
                view = view[os.write(stream, view[: select.PIPE_BUF]) :]
            except BlockingIOError:
                continue
            except OSError as exc:
                self.failures[stream] = exc

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


def is_broken_pipe(error: OSError) -> bool:
    """Say whether the reader of our output went away, as `head` does."""
    return error.errno == errno.EPIPE
