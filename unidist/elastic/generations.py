"""Training through the generations of an elastic job: what `elastic.run` does when ranks are lost, come and go."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from unidist.control.elastic.worker_link import DismissedError
from unidist.elastic.durable.commit_agreement import Wishes, agree_at_commit
from unidist.elastic.rebinding import rebind_all
from unidist.elastic.state import HostsUpdatedInterrupt, State
from unidist.errors import PeerLostError, StateLostError
from unidist.runtime import context

if TYPE_CHECKING:
    from unidist.control.elastic.member import Member
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist.elastic")

Result = TypeVar("Result")


def run_through_generations(
    membership: Member, func: Callable[..., Result], state: State, *args: Any, **kwargs: Any
) -> Result:
    """Call `func(state, ...)` in one generation after another, until it returns.

    Args:
        membership: of this process.
        func: the script's training function.
        state: what it needs to go on.
        args: further positional arguments of the function.
        kwargs: further keyword arguments.

    Raises:
        SystemExit: this process was let go: with 0, after the state was committed on every rank.
        StalledError: there were too few processes for a world for too long.
        StateLostError: ranks were lost together that held a share of the state and its only copy; the job ends.
    """
    with leaving_on_sigterm(membership):
        generations = Generations(membership, state, is_function=True)
        generations.begin()
        while True:
            try:
                result = func(state, *args, **kwargs)
                state.finish()
                return result
            except StateLostError as exc:
                membership.link.give_up(str(exc))
                raise
            except (HostsUpdatedInterrupt, PeerLostError) as exc:
                reason = generations.reason_of(exc)
            generations.go_on(reason)  # after the exception is forgotten: its frames hold on to the old generation


class Generations:
    """Leads this process and a state from one generation to the next.

    Args:
        membership: of this process.
        state: what training needs to go on.
        is_function: training is a function that is called again in each generation; else the script's own loop.
    """

    def __init__(self, membership: Member, state: State, *, is_function: bool) -> None:
        self.is_function = is_function
        self._membership = membership
        self._state = state
        self._needs_sync = True
        self._assigned: float | None = None
        membership.generations = self

    def begin(self) -> None:
        """Come to where training can begin: with the others, the state synchronised. Raises as `go_on`."""
        if self._membership.assignment is None:  # it came later, and was alone so far
            if self._state.keeps_shares:
                self._state.save()  # all of it, while this rank has it alone
            self._needs_sync, self._assigned = _enter(self._membership, self._state, "")
        self._settle()

    def reason_of(self, exc: HostsUpdatedInterrupt | PeerLostError) -> str:
        """Return what was lost; "" if the members have come to an end by agreement."""
        if isinstance(exc, HostsUpdatedInterrupt):
            return ""
        reason = self._membership.link.ended or str(exc) or "a peer was lost"
        _log.info("%s", reason)
        if self._state.durable is not None:
            self._state.durable.abandon(reason)
        return reason

    def go_on(self, reason: str) -> None:
        """Come into another generation, from the last commit where a peer was lost, and synchronise the state.

        Args:
            reason: why the present one has ended, see `reason_of`.

        Raises:
            SystemExit: this process was let go: with 0, after the state was committed on every rank.
            StalledError: there were too few processes for a world for too long.
            StateLostError: ranks were lost together that held a share of the state and its only copy.
        """
        self._needs_sync, self._assigned = _enter(self._membership, self._state, reason)
        self._settle()

    def _settle(self) -> None:
        """Synchronise the state, in this generation or a later one."""
        membership, state = self._membership, self._state
        while True:
            try:
                assert membership.assignment is not None
                needs_sync = self._needs_sync or state.keeps_shares
                state.begin_generation(membership.assignment.progress, needs_sync=needs_sync)
                _begin(membership, state, self._assigned)
                return
            except StateLostError as exc:
                membership.link.give_up(str(exc))
                raise
            except (HostsUpdatedInterrupt, PeerLostError) as exc:
                reason = self.reason_of(exc)
            self._needs_sync, self._assigned = _enter(membership, state, reason)


def _begin(membership: Member, state: State, assigned: float | None) -> None:
    """Note that training begins, after all that was to be restored since the place was assigned."""
    runtime, assignment = context.current(), membership.assignment
    assert assignment is not None
    seconds = None if assigned is None else time.monotonic() - assigned
    membership.link.step_timer.begin(
        assignment.generation,
        progress=state.num_commits,
        waited_sec=runtime.recorder.waited_sec,
        restore_sec=seconds,
    )
    if seconds is not None:
        _record_phase(runtime, "RESTORE", seconds)


def _record_phase(runtime: Context, phase: str, seconds: float, *, ago: float = 0.0) -> None:
    """Show a phase of a recovery, which ended `ago` seconds ago, on the timeline."""
    if runtime.timeline is not None:
        stop = time.monotonic_ns() - int(ago * 1e9)
        runtime.timeline.record("recovery", phase, stop - int(seconds * 1e9), stop)


def _enter(membership: Member, state: State, reason: str) -> tuple[bool, float]:
    """Come into the next generation that lives long enough.

    Returns whether the state has to be synchronised, and when the place there was assigned.

    Args:
        membership: of this process.
        state: is restored if something was lost.
        reason: what was lost; "" if the members have come to an end by agreement.
    """
    is_lost = bool(reason)
    while True:
        began = time.monotonic()
        context.shutdown()
        try:
            assignment = membership.next_world(state.num_commits, reason=reason)
        except DismissedError as exc:
            _log.info("%s", exc)
            raise SystemExit(0) from exc
        formed = time.monotonic()
        try:
            runtime = context.init()
            rebind_all(runtime)
            if is_lost:
                state.restore()  # not before: what was half exchanged in the old world is forgotten now
            state.on_reset()
        except PeerLostError as exc:
            reason = membership.link.ended or str(exc) or "a peer was lost"
            is_lost = True
            continue
        _log.info(
            "generation %d: rank %d of %d; waited %.3f s for it, connected in %.3f s",
            assignment.generation,
            assignment.topology.rank,
            assignment.topology.world_size,
            formed - began,
            time.monotonic() - formed,
        )
        _record_phase(runtime, "RE-FORM", formed - began, ago=time.monotonic() - formed)
        return assignment.needs_sync, formed


def ask_for_change(runtime: Context, membership: Member, *, checkpoint: bool = False) -> Wishes:
    """Return what the ranks agree on: the world changes now, above all. Collective; a step has been taken.

    Args:
        runtime: the present context.
        membership: of this process.
        checkpoint: this rank wants a durable checkpoint.
    """
    link = membership.link
    agreed = agree_at_commit(runtime, checkpoint=checkpoint)
    first_step_sec = link.step_timer.commit(waited_sec=runtime.recorder.waited_sec)
    if first_step_sec is not None:
        _record_phase(runtime, "FIRST_STEP", first_step_sec)
        link.tell()
    return agreed


@contextmanager
def leaving_on_sigterm(membership: Member) -> Iterator[None]:
    """Let a first SIGTERM ask for leave, at the next commit; a second one ends the process as it always does.

    A script that handles SIGTERM itself keeps its handler.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        membership.link.leaving()

    signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) == ask:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
