"""This process as a member of an elastic job: which generation it is in, and how it comes into the next one.

One `Member` lives as long as the process; contexts come and go with the generations.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unidist.settings.worker_place import WorkerPlace
from unidist.topology import Topology

if TYPE_CHECKING:
    from unidist.control.elastic.worker_link import Assignment

_log = logging.getLogger("unidist.elastic")


class Member:
    """Membership of this process in an elastic job.

    A process that is there from the beginning has a rank from `init()` on. One that comes later is alone at first, the
    only rank of a private world, in which it can import, build and load what it needs. It joins the others when it
    calls `next_world`, at the beginning of the script's elastic function.

    Args:
        place: where it is.

    Raises:
        As `WorkerLink`, and `WorkerLink.next_world`.
    """

    def __init__(self, place: WorkerPlace) -> None:
        # Every process asks whether it is a member; those that are not need none of this.
        from unidist.control.elastic.membership import NO_STATE
        from unidist.control.elastic.worker_link import WorkerLink

        self._place = place
        self._epochs = itertools.count()
        self._interrupts: list[Callable[[str], None]] = []
        self._rebindables: list[weakref.ref[Any]] = []
        self.assignment: Assignment | None = None
        """The generation that it is in; None while it is alone."""
        self.generations: Any = None
        """What leads it through them, an `elastic_run.Generations`; None before training begins."""
        self.on_change: Callable[..., None] | None = None
        """Called with the generation that is to change, `joining=` and `leaving=`, by the thread of the link."""
        self.link = WorkerLink(
            place.server,
            place.secret,
            place.worker,
            timeout=timedelta(seconds=60),
            on_ended=self._interrupt,
            on_change=self._change,
            orphan_timeout=place.orphan_timeout,
        )
        if self.link.is_first:
            self.assignment = self.next_world(NO_STATE, reason="")

    @property
    def topology(self) -> Topology:
        """This process's place now."""
        return self.assignment.topology if self.assignment is not None else Topology()

    @property
    def generation(self) -> int:
        """The number of the generation; -1 while it is alone."""
        return self.assignment.generation if self.assignment is not None else -1

    @property
    def job_key(self) -> str:
        """Equal on the members of this generation that are on this host."""
        owner = f"g{self.generation}" if self.assignment is not None else f"alone{os.getpid()}"
        return f"{self._place.job_key}/{owner}"

    def next_epoch(self) -> int:
        """Count the `init()` calls within a generation."""
        return next(self._epochs)

    def next_world(self, progress: int, *, reason: str) -> Assignment:
        """Come into the next generation; see `WorkerLink.next_world`."""
        self.assignment = self.link.next_world(
            progress, reason=reason, timeout=self._place.timeout, patience=self._place.patience
        )
        self._epochs = itertools.count()
        return self.assignment

    def add_rebindable(self, rebindable: Any) -> None:
        """Register an object to be rebound in each generation, by weak reference; see `unidist.elastic.rebinding`."""
        self._rebindables.append(weakref.ref(rebindable))

    def remove_rebindable(self, rebindable: Any) -> None:
        """Rebind this object no more: another one does so."""
        self._rebindables = [each for each in self._rebindables if each() is not rebindable]

    def rebindables(self) -> list[Any]:
        """Return the registered objects that are still alive, in the order in which they were registered."""
        return [alive for reference in self._rebindables if (alive := reference()) is not None]

    def interrupt_by(self, interrupt: Callable[[str], None]) -> Callable[[], None]:
        """Have `interrupt` called, by another thread, when the generation ends; returns what takes that back.

        It is called at once if the generation has ended already.
        """
        self._interrupts.append(interrupt)
        if self.link.ended:
            interrupt(self.link.ended)

        def forget() -> None:
            if interrupt in self._interrupts:
                self._interrupts.remove(interrupt)

        return forget

    def _change(self, generation: int) -> None:
        if self.on_change is not None:
            self.on_change(generation, joining=self.link.others_join, leaving=self.link.some_leave)

    def _interrupt(self, text: str) -> None:
        for interrupt in list(self._interrupts):
            try:
                interrupt(text)
            except Exception:  # what is half closed raises this and that; the others have to be told
                _log.debug("an interrupt failed", exc_info=True)


def join(place: WorkerPlace) -> Member:
    """Return this process's membership; the first call connects, and waits for the first generation."""
    global _member
    if _member is None or _member.link.worker != place.worker:
        _member = Member(place)
        atexit.register(_member.link.close)
    return _member


def present() -> Member | None:
    """Return this process's membership; None if its job is not elastic, or `init()` was not called."""
    return _member


def is_alone() -> bool:
    """Return whether this process is to join an elastic job later, and is in no generation of it yet."""
    return _member is not None and _member.assignment is None


_member: Member | None = None


def _forget_in_child() -> None:
    global _member
    if _member is not None:
        _member.link.forget()
        _member = None


os.register_at_fork(after_in_child=_forget_in_child)

__all__ = ["Member", "WorkerPlace", "is_alone", "join", "present"]
