"""Tracebacks on standard error: held back until it is known whose failure matters, and cut down to the script's frames.

Pure; bytes throughout.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sysconfig
from collections.abc import Iterable, Sequence

from unidist.installation import DISTRIBUTION

HOLD_SEC = 5.0
"""A rank that still runs so long after a traceback lives on: it has only logged it."""

_HEADER = b"Traceback (most recent call last):"
_RANK_PREFIX = re.compile(rb"\[rank\d+\]: ?")  # by PyTorch, once its default process group is initialized
_FRAME = re.compile(rb'  File "(.+)", line \d+, in ')
_REST_OF_FRAME = (b"    ", b"  [Previous line repeated")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(\w+)")
_OWN_NAME = re.compile(r"unidist(_\w+)?")
_FRAMEWORKS = frozenset({"torch", "keras", "tf_keras", "tensorflow"})
_PYTHON = "Python"


class HeldTracebacks:
    """Holds back what ranks write to standard error from a traceback's header on.

    A rank that ends after a traceback may only be another's victim. So its last words wait until the launcher knows,
    or until `HOLD_SEC` have passed.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[bytes]] = {}
        self._since: dict[int, float] = {}
        self._holds_on = False

    def take(self, rank: int, lines: Iterable[bytes], now: float) -> list[bytes]:
        """Return those of a rank's next lines that need not wait."""
        shown: list[bytes] = []
        for line in lines:
            if rank not in self._held and _without_prefix(line).startswith(_HEADER):
                self._held[rank], self._since[rank] = [], now
            self._held.get(rank, shown).append(line)
        return shown

    def release(self, rank: int) -> list[bytes]:
        """Return what is held of a rank, frames folded, and hold no more of it."""
        self._since.pop(rank, None)
        return folded(self._held.pop(rank, ()))

    def drop(self, rank: int) -> None:
        """Forget what is held of a rank."""
        self._since.pop(rank, None)
        self._held.pop(rank, None)

    def hold_on(self) -> None:
        """From now on only `release` ends the wait: the rank to blame is known."""
        self._holds_on = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of which something is held."""
        return tuple(self._held)

    def due(self, now: float) -> tuple[int, ...]:
        """Return the ranks that have lived on after their traceback."""
        return () if self._holds_on else tuple(rank for rank, since in self._since.items() if now - since >= HOLD_SEC)

    def deadline(self) -> float | None:
        """Return when the next rank is due; None if none will be."""
        return None if self._holds_on else min((since + HOLD_SEC for since in self._since.values()), default=None)


def folded(lines: Sequence[bytes]) -> list[bytes]:
    """Return lines in which frames of unidist, and of a framework on the way to them, are one line each time.

    Frames of scripts stay, and so do those at the end that are no longer unidist's: the error comes from there.
    """
    found: list[bytes] = []
    run: list[tuple[str, list[bytes]]] = []  # frames that are not the script's: whose they are, and their lines
    for line in map(_without_prefix, lines):
        frame = _FRAME.match(line)
        if frame is None:
            if run and line.startswith(_REST_OF_FRAME):
                run[-1][1].append(line)
                continue
            found += _folded_run(run)
            found.append(line)
            run = []
        elif owner := _owner(frame[1].decode(errors="replace")):
            run.append((owner, [line]))
        else:
            found += _folded_run(run)
            found.append(line)
            run = []
    return found + _folded_run(run)


def _folded_run(run: Sequence[tuple[str, list[bytes]]]) -> list[bytes]:
    last = max((i for i, (owner, _) in enumerate(run) if owner == "unidist"), default=-1)
    lines = [line for _, frame in run[last + 1 :] for line in frame]
    if last < 0:
        return lines
    owners = [owner for owner in dict.fromkeys(owner for owner, _ in run[: last + 1]) if owner != _PYTHON]
    owners.sort(key=lambda owner: owner != "unidist")
    number = f"{last + 1} frame{'s' if last else ''}"
    return [f"  ... {number} of {' and '.join(owners)} (--full-tracebacks shows them)".encode(), *lines]


def _without_prefix(line: bytes) -> bytes:
    prefix = _RANK_PREFIX.match(line)
    return line if prefix is None else line[prefix.end() :]


def _owner(path: str) -> str:
    """Return whose a source file is: "unidist", a framework's name, Python's; "" if it is the script's."""
    if path.startswith(_own_folders()):
        return "unidist"
    installed = _INSTALLED.search(path)
    if installed is not None:
        name = installed[1]
        return "unidist" if _OWN_NAME.fullmatch(name) else name if name in _FRAMEWORKS else ""
    return _PYTHON if path.startswith((sysconfig.get_path("stdlib") + "/", "<frozen ")) else ""


@functools.cache
def _own_folders() -> tuple[str, ...]:
    """Return the folders of unidist's own packages on this host, wherever they are installed."""
    names = {"unidist", __name__.partition(".")[0]}
    for point in importlib.metadata.entry_points(group="unidist"):
        if point.dist is not None and point.dist.name == DISTRIBUTION:
            names.add(point.module.partition(".")[0])
    found: list[str] = []
    for name in sorted(names):
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:
            continue
        if spec is not None:
            found += [f"{folder}/" for folder in spec.submodule_search_locations or ()]
    return tuple(found)
