"""Plays lists of steps, one list for each rank, in the order that their dependencies allow.

Takes time in proportion to the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from unidist_pipeline.schedules.facts import Fact


class PlaybackStep(NamedTuple):
    """One step of a rank.

    Attributes:
        needs: facts that must hold before it starts.
        gives: the fact that holds when it has ended; None for none.
        duration: from start to end.
        announces: a fact that holds when the rank has reached this step, before it starts; None for none.
        delay: time between the end and the moment from which `gives` holds.
    """

    needs: tuple[Fact, ...] = ()
    gives: Fact | None = None
    duration: float = 0.0
    announces: Fact | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class Playback:
    """The result of playing.

    Attributes:
        starts: start of each step of each rank, as far as the rank got.
        ends: likewise the ends.
        stuck: for each rank that did not finish, the index of its step and a fact that never held.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: dict[int, tuple[int, Fact]]


def play(ranks: Sequence[Sequence[PlaybackStep]]) -> Playback:
    """Run every list in order; each step as soon as its rank is free and all facts that it needs hold."""
    known: dict[Fact, float] = {}
    waiting: dict[Fact, list[int]] = {}
    starts: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    clocks = [0.0] * len(ranks)
    runnable = list(reversed(range(len(ranks))))

    while runnable:
        rank = runnable.pop()
        steps = ranks[rank]
        clock = clocks[rank]
        for needs, gives, duration, announces, delay in islice(steps, len(ends[rank]), None):
            if announces is not None and announces not in known:
                known[announces] = clock
                runnable += waiting.pop(announces, ())
            start = clock
            missing = None
            for fact in needs:
                time = known.get(fact)
                if time is None:
                    missing = fact
                    break
                if time > start:
                    start = time
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            clock = start + duration
            starts[rank].append(start)
            ends[rank].append(clock)
            if gives is not None:
                known[gives] = clock + delay
                if gives in waiting:
                    runnable += waiting.pop(gives)
        clocks[rank] = clock
    stuck = {rank: (len(ends[rank]), fact) for fact, ranks_ in waiting.items() for rank in ranks_}
    return Playback(starts, ends, dict(sorted(stuck.items())))
