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

from unidist import context
from unidist.buffer import Buffer, DType
from unidist.carried import move_all
from unidist.communicator import ReduceOp
from unidist.control.worker_link import DismissedError
from unidist.elastic import HostsUpdatedInterrupt, State
from unidist.errors import PeerLostError, StateLostError

if TYPE_CHECKING:
    from unidist.context import Context
    from unidist.control.member import Member

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
        args: further arguments of the function, as are `kwargs`.

    Raises:
        SystemExit: this process was let go: with 0, after the state was committed on every rank.
        StalledError: there were too few processes for a world for too long.
        StateLostError: ranks were lost together that held a share of the state and its only copy; the job ends.
    """
    with _leaving_on_sigterm(membership):
        needs_sync = True
        reason = ""
        assigned: float | None = None
        if membership.assignment is None:  # it came later, and was alone so far
            if state.keeps_shares:
                state.save()  # all of it, while this rank has it alone
            needs_sync, assigned = _enter(membership, state, "")
        while True:
            try:
                if needs_sync or state.keeps_shares:
                    state.sync()
                assert membership.assignment is not None
                state.num_commits = membership.assignment.progress
                _begin(membership, assigned)
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                reason = ""
            except StateLostError as exc:
                membership.link.give_up(str(exc))
                raise
            except PeerLostError as exc:
                reason = membership.link.ended or str(exc) or "a peer was lost"
                _log.info("%s", reason)
            needs_sync, assigned = _enter(membership, state, reason)


def _begin(membership: Member, assigned: float | None) -> None:
    """Note that training begins, after all that was to be restored since the place was assigned."""
    runtime, assignment = context.current(), membership.assignment
    assert assignment is not None
    seconds = None if assigned is None else time.monotonic() - assigned
    membership.link.pace.begin(
        assignment.generation,
        progress=max(assignment.progress, 0),
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
            move_all(runtime)
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


def ask_for_change(runtime: Context, membership: Member) -> bool:
    """Say, on every rank alike, whether the world is to change now. Collective; a step has been taken."""
    link = membership.link
    link.step()
    if runtime.topology.world_size == 1:
        link.check()
        wanted = link.change_is_wanted
    else:
        wanted = runtime.owned(_Agreement).on(link.change_is_wanted)
    first_step_sec = link.pace.commit(waited_sec=runtime.recorder.waited_sec)
    if first_step_sec is not None:
        _record_phase(runtime, "FIRST_STEP", first_step_sec)
        link.tell()
    return wanted


class _Agreement:
    """Tells whether any rank wants something: all of them stop at the same step. Made once for each generation."""

    def __init__(self, runtime: Context) -> None:
        self._communicator = runtime.duplicate_world()
        self._recorder = runtime.recorder
        self._flag = Buffer.allocate(1, DType.UINT8)

    def on(self, wanted: bool) -> bool:
        """Say whether any rank wants it. Collective."""
        view = self._flag.bytes()
        view[0] = int(wanted)
        self._recorder.wait(self._communicator.allreduce(self._flag, self._flag, op=ReduceOp.MAX))
        return bool(view[0])

    def close(self) -> None:
        """Give back the communicator."""
        self._communicator.close()


@contextmanager
def _leaving_on_sigterm(membership: Member) -> Iterator[None]:
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
