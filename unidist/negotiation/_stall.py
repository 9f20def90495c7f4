"""The words of a stall report: which operations wait, and for which ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from unidist.communicator import format_ranks
from unidist.negotiation.request import Request, describe


@dataclass(frozen=True)
class Situation:
    """One rank's knowledge of the pending operations.

    Args:
        rank: this rank.
        size: number of ranks.
        waiting: by name, the ranks that have announced an operation that is not ready.
        absent: ranks that have not entered the exchange or operation that this rank is in; empty if not known.
        executing: names of the operations that are being run, in which this rank waits.
        joined: ranks that have joined, for which nothing waits.
    """

    rank: int
    size: int
    waiting: Mapping[str, Collection[int]]
    absent: frozenset[int] = frozenset()
    executing: frozenset[str] = frozenset()
    joined: frozenset[int] = frozenset()

    def missing(self, name: str) -> list[int]:
        """Return the ranks for which `name` waits: as precisely as is known, in rank order."""
        if name in self.executing or (name not in self.waiting and self.absent):
            return sorted(self.absent)
        there = {*self.submitted(name), *self.joined}
        return [rank for rank in range(self.size) if rank not in there]

    def submitted(self, name: str) -> list[int]:
        """Return the ranks that are known to have submitted `name`, which this rank has, in rank order."""
        return sorted({self.rank, *self.waiting.get(name, ())})


def stall_line(request: Request, seconds: float, situation: Situation) -> str:
    """Return the sentence on one operation that this rank has submitted."""
    name, missing, submitted = request.name, situation.missing(request.name), situation.submitted(request.name)
    head = f"{name!r} ({describe(request.signature)}) has waited {seconds:.3g} s on rank {situation.rank}: "
    if name in situation.executing:
        return head + (
            f"all ranks have submitted it, but {_ranks(missing)} did not come to its execution"
            if missing
            else "all ranks have submitted it, and its execution does not end"
        )
    if name in situation.waiting:
        silent = sorted(situation.absent.intersection(missing))
        line = f"{head}submitted by {_ranks(submitted)}, not by {_ranks(missing)}"
        return line + (f"; {_ranks(silent)} {_has(silent)} submitted nothing since" if silent else "")
    # Announced in the exchange that is still open: what the others announced in it is not known here.
    if not situation.absent:
        return f"{head}submitted by {_ranks(submitted)}; nothing is known of {_ranks(missing)}"
    unknown = [rank for rank in range(situation.size) if rank not in situation.absent and rank not in submitted]
    line = f"{head}submitted by {_ranks(submitted)}; {_ranks(missing)} {_has(missing)} submitted nothing"
    return line + (f"; what {_ranks(unknown)} submitted is not known yet" if unknown else "")


def wanted_lines(pending: Collection[str], situation: Situation) -> list[str]:
    """Return a sentence for each operation that other ranks wait for this one to submit."""
    return [
        f"{name!r} is submitted by {_ranks(sorted(ranks))}, not by this rank"
        for name, ranks in situation.waiting.items()
        if name not in pending and situation.rank not in ranks
    ]


def stall_report(lines: Iterable[str], rank: int) -> str:
    """Return the text of the error that ends the wait."""
    return (
        f"rank {rank} gave up waiting for other ranks: {'; '.join(lines)}. "
        "Every rank must submit the same named operations; look for a branch that some ranks do not take, "
        "or raise UNIDIST_TIMEOUT_SEC if they are only slow."
    )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank {next(iter(ranks))}" if len(ranks) == 1 else f"ranks {format_ranks(tuple(ranks))}"


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
