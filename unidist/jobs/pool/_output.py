"""Shows the output of a pool's ranks in this process, each line after its rank: for notebooks.

In a notebook, what a process prints appears where the kernel's own `sys.stdout` writes it: in the cell that runs. So
the ranks write to pipes, and the thread that waits for them reads these.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TextIO

_READ_BYTES = 1 << 16
_END = re.compile(r"([\n\r])")


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, by what IPython says if it is loaded."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return getattr(get() if get is not None else None, "kernel", None) is not None


@dataclass(eq=False)
class RankPipe:
    """One stream of a rank.

    Args:
        label: what stands before each line.
        file: the pipe's end here.
        is_error: it is the rank's standard error.
    """

    label: str
    file: IO[bytes]
    is_error: bool
    _rest: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _has_ended: bool = False

    def __post_init__(self) -> None:
        os.set_blocking(self.file.fileno(), False)

    def show(self, *, whole: bool = False) -> bool:
        """Show the lines that have come; returns whether there was anything.

        A carriage return ends a line, too: a progress bar is drawn over itself.

        Args:
            whole: also what has no end yet.
        """
        data = b""
        if not self._has_ended:
            with suppress(BlockingIOError):
                data = os.read(self.file.fileno(), _READ_BYTES)
                self._has_ended = not data
        text = self._rest + self._decoder.decode(data)
        if text.endswith("\r") and not whole:  # the newline of "\r\n" may be still to come
            text, self._rest = text[:-1], "\r"
        else:
            self._rest = ""
        text = text.replace("\r\n", "\n")
        *parts, last = _END.split(text)
        lines = [content + end for content, end in zip(parts[::2], parts[1::2], strict=True)]
        if not whole:
            self._rest = last + self._rest
        elif last:
            lines.append(last + "\n")
        shown = "".join(f"{self.label}{line}" for line in lines if line.strip("\r"))
        if shown:
            target: TextIO = sys.stderr if self.is_error else sys.stdout
            target.write(shown)
            target.flush()
        return bool(data)

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more will come."""
        return self._has_ended


def show_rest(pipes: Sequence[RankPipe]) -> None:
    """Show what is in the pipes now, and close them."""
    for pipe in pipes:
        while pipe.show():
            pass
        pipe.show(whole=True)
        pipe.file.close()


__all__ = ["RankPipe", "is_notebook", "show_rest"]
