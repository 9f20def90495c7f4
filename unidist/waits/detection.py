"""Which ranks wait for each other and cannot come together. Pure.

A rank that is blocked waits for every rank of the group that has not entered its call. It can go on if all of those
can; a rank that computes can. What remains after that rule was applied as often as it changes anything is a deadlock.
(The AND model of resource deadlocks: E. Knapp, Deadlock detection in distributed databases, 1987.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from unidist.communicator import format_ranks

__all__ = ["Activity", "BlockedCall", "Deadlock", "RankState", "find_deadlock", "missing_ranks", "waiting_line"]

UNEVEN_BATCHES = (
    "If the ranks have different numbers of batches, let each call ud.join() after its last one, or give all the same "
    "number (ud.shard does)."
)
MAX_LISTED = 16
"""Ranks that a message lists one by one."""


class Activity(StrEnum):
    """The state of one rank."""

    RUNNING = "running"
    BLOCKED = "blocked"
    LEFT = "left"


@dataclass(frozen=True)
class BlockedCall:
    """The call in which a rank is blocked.

    Args:
        key: distinguishes it from other calls of its rank.
        awaited: world ranks whose counterpart completes it: the others of the group, or the peer of a message.
        text: the call in words.
        asked: what to call on every rank; "" if that is not the matter.
    """

    key: int
    awaited: tuple[int, ...]
    text: str
    asked: str = ""


@dataclass(frozen=True)
class RankState:
    """One rank at one moment.

    Args:
        activity: what it does.
        calls: in which it is blocked; it goes on when one of them does.
        where: line of the script at which it is, or "".
        entered: the calls of other ranks, as (rank, key), whose counterpart this rank has entered.
        inside: line of the library that the script has called, or "".
        ending: of a rank that has left, as the end of a sentence about it.
    """

    activity: Activity
    calls: tuple[BlockedCall, ...] = ()
    where: str = ""
    entered: Collection[tuple[int, int]] = ()
    inside: str = ""
    ending: str = "has ended."


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for each other.

    Args:
        ranks: that are blocked for good.
        text: for the error that all of them raise: one line per rank.
    """

    ranks: tuple[int, ...]
    text: str


def missing_ranks(rank: int, call: BlockedCall, states: Mapping[int, RankState]) -> list[int]:
    """Return the ranks that a call of a blocked rank waits for: they have not entered it."""
    return [peer for peer in call.awaited if peer in states and (rank, call.key) not in states[peer].entered]


def find_deadlock(states: Mapping[int, RankState]) -> Deadlock | None:
    """Return the ranks that cannot go on, or None.

    Args:
        states: of the ranks at one moment, by world rank. A rank of which nothing is known is left out: it is taken
            to be able to go on.
    """
    moving = {rank for rank, state in states.items() if state.activity is Activity.RUNNING}
    blocked = [rank for rank, state in states.items() if state.activity is Activity.BLOCKED]
    changed = True
    while changed:
        able = [
            rank
            for rank in blocked
            if rank not in moving
            and any(moving.issuperset(missing_ranks(rank, call, states)) for call in states[rank].calls)
        ]
        moving.update(able)
        changed = bool(able)
    dead = sorted(rank for rank in blocked if rank not in moving)
    return Deadlock(tuple(dead), _text(dead, states)) if dead else None


def _text(dead: Sequence[int], states: Mapping[int, RankState]) -> str:
    lines = ["the ranks wait for each other in calls that cannot come together:"]
    lines += _lines(states, dead)
    asked = sorted({call.asked for rank in dead for call in states[rank].calls if call.asked})
    lines.append(
        f"Every rank must make this call in its turn: {' and '.join(asked)}."
        if asked
        else "Every rank must make the same calls in the same order."
    )
    if any(state.activity is Activity.LEFT for state in states.values()):
        lines.append(UNEVEN_BATCHES)
    return "\n".join(lines)


def _lines(states: Mapping[int, RankState], dead: Collection[int]) -> list[str]:
    """Return a line per rank; where there are many, those that do the same share one."""
    described = {rank: _described(rank, states, rank in dead) for rank in sorted(states)}
    if len(described) <= MAX_LISTED:
        return [f"  rank {rank} {text}" for rank, text in described.items()]
    together: dict[str, list[int]] = {}
    for rank, text in described.items():
        together.setdefault(text, []).append(rank)
    return [f"  {_ranks(ranks)}: {text}" for text, ranks in together.items()]


def _described(rank: int, states: Mapping[int, RankState], is_dead: bool) -> str:
    state = states[rank]
    if state.activity is Activity.LEFT:
        return state.ending
    if not state.calls:
        return _running(state)
    call = state.calls[0]
    text = f"waits in {call.text}{_at(state.where)}"
    missing = missing_ranks(rank, call, states)
    return f"{text}, for {_ranks(missing)}" if is_dead and missing else text


def waiting_line(
    call: BlockedCall, seconds: float, waiting: Sequence[int], missing: Sequence[int], states: Mapping[int, RankState]
) -> str:
    """Return the line that says who waits in which call for how long, for whom, and where that rank is.

    Args:
        call: of one of the waiting ranks.
        seconds: for which they have waited.
        waiting: ranks that are blocked in it.
        missing: the ranks that they wait for.
        states: of all ranks.
    """
    parts = [f"rank {rank}, which {_doing(states[rank])}" for rank in missing[:MAX_LISTED]]
    if len(missing) > MAX_LISTED:
        parts.append(f"{len(missing) - MAX_LISTED} more")
    verb = "has" if len(waiting) == 1 else "have"
    where = _at(states[waiting[0]].where)
    return f"{_ranks(waiting)} {verb} waited {seconds:.0f} s in {call.text}{where} for {'; '.join(parts)}"


def _doing(state: RankState) -> str:
    if state.calls:
        return f"waits in {state.calls[0].text}{_at(state.where)}"
    return _running(state)


def _running(state: RankState) -> str:
    return f"runs{_at(state.where)}" + (f" ({state.inside})" if state.inside else "")


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
