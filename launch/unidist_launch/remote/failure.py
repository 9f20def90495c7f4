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
# What all ranks of a group raise together; one that failed in another way may have been the reason.
_GROUPS_ERRORS = frozenset({"DeadlockError", "MismatchError"})
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")  # by PyTorch, once its default process group is initialized
_HEADERS = ("Traceback (most recent call last):", "Fatal Python error: ")
_EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(:|$)")
# TensorFlow's AutoGraph puts the trace within a graph, and the real text, into the exception's own.
_IN_USER_CODE = ": in user code:"
_INNER_EXCEPTION_LINE = re.compile(r" {4}[A-Za-z_][\w.]*: ")


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
        host: name of its host, where ranks come and go; "" where a rank has one host.
        tolerated: the others go on without it.
    """

    rank: int
    pid: int
    returncode: int
    round: int
    stderr_tail: tuple[str, ...] = ()
    signalled: bool = False
    host_lost: str = ""
    host: str = ""
    tolerated: bool = False

    @property
    def is_lost(self) -> bool:
        """True when a signal has ended it, or its host is lost: nothing that its script did by itself."""
        return bool(self.host_lost) or self.returncode < 0

    @property
    def traceback(self) -> tuple[str, ...]:
        """The last traceback on standard error, from its header to the end; empty if there is none."""
        tail = tuple(_RANK_PREFIX.sub("", line, count=1) for line in self.stderr_tail)
        for i in range(len(tail) - 1, -1, -1):
            if tail[i].startswith(_HEADERS):
                return tail[i:]
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
        return not self.host_lost and self.returncode > 0 and self.exception_name in _VICTIMS_ERRORS

    @property
    def may_be_consequence(self) -> bool:
        """True when another rank that failed is to blame rather than this one."""
        return self.is_victim or (not self.host_lost and self.returncode > 0 and self.exception_name in _GROUPS_ERRORS)

    @property
    def exception_name(self) -> str:
        """The class of the exception, without its module ("ValueError"), or ""."""
        return self.exception_line.partition(":")[0].rpartition(".")[2]

    @property
    def reason(self) -> str:
        """Why it ended, in one line."""
        return self.host_lost or self.exception_line or describe_exit(self.returncode)

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode


def choose_culprit(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the failure that started it all: the first that is not the consequence of another rank's.

    Ends that the launcher caused do not count, nor those without which the others go on. Of those seen at the same
    time, one by a signal goes first: it is the one that could not have waited for anybody. None when nothing failed.
    """
    failed = [end for end in exits if end.returncode and not end.signalled and not end.tolerated]
    return min(
        failed,
        key=lambda end: (end.is_victim, end.may_be_consequence, end.round, end.returncode > 0, end.rank),
        default=None,
    )


def settle_seconds(exits: Sequence[RankExit]) -> float:
    """Return how long after the first failure the launcher waits before it decides."""
    culprit = choose_culprit(exits)
    return SETTLE_FOR_CULPRIT_SEC if culprit and culprit.may_be_consequence else SETTLE_SEC


def report(culprit: RankExit, exits: Sequence[RankExit], host: str) -> str:
    """Return the text that ends a failed job: the cause first, then what became of the other ranks.

    It has no traceback: the launcher has shown that of the culprit among the ranks' lines.
    """
    others = [end for end in exits if end is not culprit]
    if culprit.host_lost:
        with_it = [end.rank for end in exits if end.host_lost == culprit.host_lost]
        text = [f"unidist: {culprit.host_lost} ({_ranks(with_it)} ran there)"]
        others = [end for end in others if end.rank not in with_it]
    else:
        together = _raised_together(culprit, exits)
        text = _cause(culprit, host, together, is_everybody=len(together) == len(exits))
        others = [end for end in others if end not in together]
    lost = [end.rank for end in others if end.tolerated]
    if lost:
        text.append(f"unidist: lost before: {_ranks(lost)}")
    others = [end for end in others if not end.tolerated]
    ended = [end.rank for end in others if end.signalled]
    if ended:
        text.append(f"unidist: ended by the launcher: {_ranks(ended)}")
    failed = [end for end in others if end.returncode and not end.signalled]
    victims = [end for end in failed if end.is_victim]
    if victims:
        names = dict.fromkeys(end.exception_name for end in victims)
        text.append(f"unidist: failed in consequence: {_ranks([end.rank for end in victims])} ({', '.join(names)})")
    by_reason: dict[str, list[int]] = {}
    for end in failed:
        if not end.is_victim:
            by_reason.setdefault(end.reason, []).append(end.rank)
    for reason, ranks in by_reason.items():
        told = "the same" if reason == culprit.reason and culprit.exception_line else reason
        text.append(f"unidist: also failed: {_ranks(ranks)}: {told}")
    text.append(f"unidist: exit code {culprit.exit_code}")
    return "\n".join(text)


def _raised_together(culprit: RankExit, exits: Sequence[RankExit]) -> list[RankExit]:
    """Return the ranks that raised an error of the whole group, the culprit among them; one rank alone is none."""
    if culprit.returncode <= 0 or culprit.exception_name not in _GROUPS_ERRORS:
        return []
    found = [end for end in exits if not end.signalled and end.exception_name == culprit.exception_name]
    return found if len(found) > 1 else []


def _cause(culprit: RankExit, host: str, together: Sequence[RankExit], *, is_everybody: bool) -> list[str]:
    cause = describe_exit(culprit.returncode)
    if culprit.returncode > 0 and culprit.exception_line:
        cause = f"{culprit.exception_line.rstrip(':')} ({cause})"
    if together:
        who = "all ranks" if is_everybody else _ranks([end.rank for end in together])
        return [f"unidist: {who} raised together: {cause}"]
    text = [f"unidist: rank {culprit.rank} failed first (host {host}, pid {culprit.pid}): {cause}"]
    if culprit.returncode == -signal.SIGKILL:
        text.append(
            "  SIGKILL comes from outside: an operator, a scheduler, or the kernel, out of memory (`dmesg` tells)."
        )
    return text


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_label(ranks)}"
