"""Which rank is to blame when a job fails, and what to tell the user. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.jobs.processes import describe_exit
from unidist_launch.output.lines import rank_label

SETTLE_SEC = 0.2
"""How long after the first failure others are still looked at: a peer may be seen to end before the culprit."""

SETTLE_FOR_CULPRIT_SEC = 3.0
"""The same while only victims have ended: the culprit may be writing a core dump or closing its runtime."""

# What a rank raises because another one is gone or does not come.
_VICTIMS_ERRORS = frozenset({"PeerLostError", "StalledError", "HorovodInternalError"})
_HEADERS = ("Traceback (most recent call last):", "Fatal Python error: ")
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(:|$)")
# TensorFlow's AutoGraph puts the trace within a graph, and the real text, into the exception's own.
_IN_USER_CODE = ": in user code:"
_INNER_EXCEPTION_LINE = re.compile(r" {4}[A-Za-z_][\w.]*: ")
_MAX_LINES = 24


@dataclass(frozen=True)
class RankExit:
    """The end of one rank.

    Args:
        rank: the rank.
        pid: its process.
        returncode: as `subprocess` gives it: negative for a signal.
        round: number of the look at all ranks in which the end was seen; ends of one round have no known order.
        stderr_tail: its last lines on standard error.
        signalled: the launcher had already told it to end.
        host_lost: that its host was given up and why, if that is what happened; nothing else is known then.
    """

    rank: int
    pid: int
    returncode: int
    round: int
    stderr_tail: tuple[str, ...] = ()
    signalled: bool = False
    host_lost: str = ""

    @property
    def traceback(self) -> tuple[str, ...]:
        """The last traceback on standard error, from its header to the end; empty if there is none."""
        for i in range(len(self.stderr_tail) - 1, -1, -1):
            if self.stderr_tail[i].startswith(_HEADERS):
                return self.stderr_tail[i:]
        return ()

    @property
    def exception_line(self) -> str:
        """The line of the traceback that names the exception ("ValueError: ..."), or ""."""
        lines = self.traceback
        if lines and not lines[0].startswith(_HEADERS[0]):
            return lines[0]
        found = next((line for line in lines[1:] if _EXCEPTION_LINE.match(line)), "")
        if found.endswith(_IN_USER_CODE):
            inner = [line.strip() for line in lines if _INNER_EXCEPTION_LINE.match(line)]
            return inner[-1] if inner else found
        return found

    @property
    def is_victim(self) -> bool:
        """True when it ended because of another rank."""
        name = self.exception_line.partition(":")[0].rpartition(".")[2]
        return not self.host_lost and self.returncode > 0 and name in _VICTIMS_ERRORS

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode


def choose_culprit(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the failure that started it all: the first that is not the consequence of another rank's.

    Ends that the launcher caused do not count. Of those seen at the same time, one by a signal goes first:
    it is the one that could not have waited for anybody. None when nothing failed.
    """
    failed = [end for end in exits if end.returncode and not end.signalled]
    return min(failed, key=lambda end: (end.is_victim, end.round, end.returncode > 0, end.rank), default=None)


def settle_seconds(exits: Sequence[RankExit]) -> float:
    """Return how long after the first failure the launcher waits before it decides."""
    culprit = choose_culprit(exits)
    return SETTLE_FOR_CULPRIT_SEC if culprit and culprit.is_victim else SETTLE_SEC


def report(culprit: RankExit, exits: Sequence[RankExit], host: str) -> str:
    """Return the text that ends a failed job: the cause first, then what became of the other ranks."""
    others = [end for end in exits if end is not culprit]
    if culprit.host_lost:
        with_it = [end.rank for end in exits if end.host_lost == culprit.host_lost]
        text = [f"unidist: {culprit.host_lost} ({_ranks(with_it)} ran there)"]
        others = [end for end in others if end.rank not in with_it]
    else:
        text = _cause(culprit, host)
    ended = [end.rank for end in others if end.signalled]
    if ended:
        text.append(f"unidist: ended by the launcher: {_ranks(ended)}")
    text += [
        f"unidist: also failed: rank {end.rank}: {end.host_lost or end.exception_line or describe_exit(end.returncode)}"
        for end in others
        if end.returncode and not end.signalled
    ]
    text.append(f"unidist: exit code {culprit.exit_code}")
    return "\n".join(text)


def _cause(culprit: RankExit, host: str) -> list[str]:
    cause = describe_exit(culprit.returncode)
    if culprit.returncode > 0 and culprit.exception_line:
        cause = f"{culprit.exception_line} ({cause})"
    text = [f"unidist: rank {culprit.rank} failed first (host {host}, pid {culprit.pid}): {cause}"]
    if culprit.returncode == -signal.SIGKILL:
        text.append(
            "  SIGKILL comes from outside: an operator, a scheduler, or the kernel, out of memory (`dmesg` tells)."
        )
    text += [f"  {line}" for line in _excerpt(culprit)]
    return text


def _excerpt(end: RankExit) -> list[str]:
    lines = list(end.traceback) or list(end.stderr_tail[-5:])
    if len(lines) > _MAX_LINES:
        kept = _MAX_LINES - 2
        lines = [lines[0], f"... ({len(lines) - 1 - kept} lines left out)", *lines[-kept:]]
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_label(ranks)}"
