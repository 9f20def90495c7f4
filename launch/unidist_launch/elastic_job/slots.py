"""Slots in which workers may run, and when one is used again after its worker has failed. Pure.

A *slot* is a place for one worker on one host. A host may have *spare* slots beside those that it offers, for workers
that stand by: they take the place of one that is lost. What happens in one slot does not cost the others of its host:
each has a back-off and a budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from unidist.launcher import Host

FIRST_PAUSE_SEC = 1.0
LONGEST_PAUSE_SEC = 60.0
"""Without --blacklist-cooldown-range: pauses double from the first to the longest, and there is none at first."""

MAX_FAILURES = 5
"""So often in a row may the workers of a slot fail before they have been of use; then the slot is given up."""


TAKEN_BACK_PAUSE_SEC = 2.0
"""A slot that a host takes back and offers again is used again after so long: hosts may come and go all the time."""


@dataclass
class WorkerSlot:
    """A place for one worker.

    Args:
        host: name of the host.
        number: of the slot on its host; -1, -2, ... of spare ones.
        worker: that runs there.
        failures: in a row, of workers that were of no use.
        free_at: when it may be used again.
        is_gone: the host does not offer it any more.
        was_taken_back: the host has taken it back since its worker was started.
    """

    host: str
    number: int
    worker: int | None = None
    failures: int = 0
    free_at: float = 0.0
    is_gone: bool = False
    was_taken_back: bool = False

    @property
    def is_spare(self) -> bool:
        """Return whether it is one beside those that the host offers."""
        return self.number < 0

    @property
    def is_given_up(self) -> bool:
        """Return whether its budget is spent."""
        return self.failures >= MAX_FAILURES


class Slots:
    """The slots of a job, in the order of its hosts.

    Args:
        cooldown: shortest and longest pause in seconds; None: the defaults, and the first restart at once.
        num_spare: spare slots of each host.
    """

    def __init__(self, cooldown: tuple[float, float] | None = None, *, num_spare: int = 0) -> None:
        self._num_spare = num_spare
        self._at_once = cooldown is None
        self._shortest, self._longest = cooldown or (FIRST_PAUSE_SEC, LONGEST_PAUSE_SEC)
        self._slots: list[WorkerSlot] = []
        self._num_on: Counter[str] = Counter()

    def offer(self, hosts: Sequence[Host]) -> list[int]:
        """Take these hosts as what there is from now on; returns the workers whose slots are gone.

        What is known of slots that stay, and of those that come back, is kept.
        """
        ordered = [(host.name, number) for host in hosts for number in range(host.slots)]
        ordered += [(host.name, -1 - number) for host in hosts if host.slots for number in range(self._num_spare)]
        offered = set(ordered)
        known = {(slot.host, slot.number): slot for slot in self._slots}
        for key, slot in known.items():
            slot.is_gone = key not in offered
            slot.was_taken_back = slot.worker is not None and (slot.was_taken_back or slot.is_gone)
        kept = [known[key] if key in known else WorkerSlot(*key) for key in ordered]
        self._slots = kept + [slot for slot in self._slots if slot.is_gone]
        self._num_on = Counter(slot.host for slot in kept if not slot.is_spare)
        return [slot.worker for slot in self._slots if slot.is_gone and slot.worker is not None]

    @property
    def hosts(self) -> list[str]:
        """The hosts that offer slots, in order."""
        return list(dict.fromkeys(slot.host for slot in self._slots if not slot.is_gone))

    @property
    def num_running(self) -> int:
        """How many workers run in slots that stay."""
        return sum(slot.worker is not None and not slot.is_gone for slot in self._slots)

    @property
    def num_usable(self) -> int:
        """How many slots there are that are not given up, without spare ones."""
        return sum(not (slot.is_gone or slot.is_given_up or slot.is_spare) for slot in self._slots)

    def num_without(self, workers: Collection[int]) -> int:
        """Return how many slots, spare ones too, are not given up and have none of these workers."""
        return sum(not (slot.is_gone or slot.is_given_up or slot.worker in workers) for slot in self._slots)

    @property
    def num_spare(self) -> int:
        """How many spare slots there are."""
        return sum(slot.is_spare and not slot.is_gone for slot in self._slots)

    def num_on(self, host: str) -> int:
        """Return how many slots a host offers, without spare ones."""
        return self._num_on[host]

    def free(self, now: float, limit: int) -> list[WorkerSlot]:
        """Return the slots to start workers in now, so that at most `limit` run; spare slots come last."""
        free = [
            slot
            for slot in self._slots
            if slot.worker is None and not slot.is_gone and not slot.is_given_up and slot.free_at <= now
        ]
        return free[: max(0, limit - self.num_running)] if free else free

    def settle(self, members: Collection[int]) -> None:
        """Give members of the world the offered slots of their hosts, and those that stand by the spare ones.

        So a host that takes back a slot takes back a member's.
        """
        members = frozenset(members)
        for spare in self._slots:
            if not spare.is_spare or spare.worker not in members:
                continue
            for slot in self._slots:
                if slot.host == spare.host and not slot.is_spare and not slot.is_gone and slot.worker not in members:
                    spare.worker, slot.worker = slot.worker, spare.worker
                    break

    def next_free(self, now: float) -> float | None:
        """Return when a slot that pauses may be used again; None if none pauses."""
        return min((slot.free_at for slot in self._slots if slot.worker is None and slot.free_at > now), default=None)

    def snapshot(self) -> list[list[str | int | None]]:
        """Return what is known of the slots that are or were used: host, number, worker, failures. Plain data."""
        return [
            [slot.host, slot.number, slot.worker, slot.failures]
            for slot in self._slots
            if slot.worker is not None or slot.failures
        ]

    def restore(self, kept: list[list[Any]]) -> None:
        """Take over what `snapshot` returned, beside what was offered; pauses are over."""
        known = {(slot.host, slot.number): slot for slot in self._slots}
        for host, number, worker, failures in kept:
            slot = known.get((str(host), int(number)))
            if slot is None:  # not offered, or not yet
                slot = WorkerSlot(str(host), int(number), is_gone=True)
                self._slots.append(slot)
            slot.worker, slot.failures = worker, int(failures)

    def take(self, host: str, worker: int, *, instead_of: Collection[int]) -> None:
        """Put a worker into the first slot of its host that is free, or whose worker is one of these."""
        free = (
            slot for slot in self._slots if slot.host == host and (slot.worker is None or slot.worker in instead_of)
        )
        slot = next(free, None)
        if slot is not None:
            slot.worker = worker

    def slot_of(self, worker: int) -> WorkerSlot | None:
        """Return the slot of a worker."""
        return next((slot for slot in self._slots if slot.worker == worker), None)

    def failed(self, worker: int, now: float, *, was_useful: bool) -> WorkerSlot | None:
        """A worker has failed; its slot pauses, the longer the more often that happened before."""
        slot = self.slot_of(worker)
        if slot is None:
            return None
        slot.worker, slot.was_taken_back = None, False
        slot.failures = 1 if was_useful else slot.failures + 1
        pauses = slot.failures - (2 if self._at_once else 1)
        slot.free_at = now if pauses < 0 else now + min(self._longest, self._shortest * 2.0**pauses)
        return slot

    def vacated(self, worker: int, now: float, *, pause: float) -> None:
        """A worker has left in good order; its slot pauses so long, or shortly if its host took it back."""
        slot = self.slot_of(worker)
        if slot is not None:
            slot.free_at = now + (min(pause, TAKEN_BACK_PAUSE_SEC) if slot.was_taken_back else pause)
            slot.worker, slot.was_taken_back = None, False
