"""Where a thread is in the user's script, and whether the script has failed; for messages."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

__all__ = ["has_raised", "innermost", "library_line", "raised", "script_line"]

_LIBRARIES = tuple(
    os.path.join(path, "") for path in {sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")}
)


def has_raised() -> bool:
    """Return whether the script has ended with an exception that nothing caught. False in an interactive session."""
    return raised() is not None


def raised() -> BaseException | None:
    """Return the exception with which the script has ended, if it has; see `has_raised`."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return None if hasattr(sys, "ps1") else error


def script_line(thread: int) -> str:
    """Return the place of a thread in the script, as "train.py:41 in evaluate"; "" if it runs nothing of the script.

    Args:
        thread: its identifier.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_name
    place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return place if name == "<module>" else f"{place} in {name}"


def library_line(thread: int) -> str:
    """Return the place of a thread in the library that the script has called, as "data/dataloader.py:124 in _get".

    "" if the thread is in the script itself, or in unidist.

    Args:
        thread: its identifier.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or not _is_library(frame) or _is_unidist(frame):
        return ""
    file = frame.f_code.co_filename
    short = os.sep.join(file.split(os.sep)[-2:])
    return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"


def innermost(thread: int) -> str:
    """Return the file of the function that a thread executes; "" if there is no such thread."""
    frame = sys._current_frames().get(thread)
    return frame.f_code.co_filename if frame is not None else ""


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or file.startswith("<") or _is_unidist(frame)


def _is_unidist(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package == "unidist" or package.startswith("unidist_")
