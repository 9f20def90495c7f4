"""Runs training through the generations of an elastic job, as ranks fail, join and leave: the core of `elastic.run`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from unidist.control.elastic.worker_link import DismissedError
from unidist.elastic.notifications import notification_manager
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
    membership: Member,
    func: Callable[..., Result],
    reset: Callable[[], object] | None,
    state: State,
    *args: Any,
    **kwargs: Any,
) -> Result:
    """Call `func(state, ...)` in one generation after another, until it returns.

    Args:
        membership: of this process.
        func: the script's training function.
        reset: see `unidist.elastic.state.run_fn`.
        state: of the training.
        args: further positional arguments of the function.
        kwargs: further keyword arguments.

    Raises:
        SystemExit: with code 0: this process was dismissed, after the state was committed on every rank.
        StalledError: too few processes for a world, for too long.
        StateLostError: the ranks with a share of the state and its only copy were lost together; the job ends.
    """
    with leaving_on_signals(membership):
        generations = Generations(membership, state, is_function=True, reset=reset)
        try:
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
                # Outside of the handler: the exception's frames refer to the old generation.
                generations.enter_next_generation(reason)
        finally:
            generations.end()


class Generations:
    """Takes this process and its training state from one generation to the next.

    Args:
        membership: of this process.
        state: of the training.
        is_function: training is a function that is called again in each generation; else it is the script's own loop.
        reset: see `unidist.elastic.state.run_fn`.
    """

    def __init__(
        self,
        membership: Member,
        state: State,
        *,
        is_function: bool,
        reset: Callable[[], object] | None = None,
    ) -> None:
        self.is_function = is_function
        self._reset = reset
        self._membership = membership
        self._state = state
        self._needs_sync = True
        self._assigned: float | None = None
        if membership.generations is not None:
            membership.generations.end()
        membership.generations = self

    def begin(self) -> None:
        """Join the other ranks and synchronise the state, before training. Raises as `enter_next_generation`."""
        notification_manager.init()
        notification_manager.register_listener(self._state)
        notification_manager.repeat()
        if self._membership.assignment is None:  # it joins a running job, and was alone so far
            if self._state.keeps_shares:
                self._state.save()  # all of it, while this rank is alone
            self._needs_sync, self._assigned = self._enter("")
        self._synchronise()

    def end(self) -> None:
        """Tell the state of no more changes. Called when the function has returned, or another training begins."""
        with contextlib.suppress(KeyError):
            notification_manager.remove_listener(self._state)

    def reason_of(self, exc: HostsUpdatedInterrupt | PeerLostError) -> str:
        """Return what was lost; "" if the generation ended by agreement of its members."""
        if isinstance(exc, HostsUpdatedInterrupt):
            return ""
        reason = self._membership.link.ended or str(exc) or "a peer was lost"
        _log.info("%s", reason)
        if self._state.durable is not None:
            self._state.durable.abandon(reason)
        return reason

    def enter_next_generation(self, reason: str) -> None:
        """Enter the next generation and synchronise the state, that of the last commit if a peer was lost.

        Args:
            reason: why the present generation has ended, see `reason_of`.

        Raises:
            SystemExit: with code 0: this process was dismissed, after the state was committed on every rank.
            StalledError: too few processes for a world, for too long.
            StateLostError: the ranks with a share of the state and its only copy were lost together.
        """
        self._needs_sync, self._assigned = self._enter(reason)
        self._synchronise()

    def _synchronise(self) -> None:
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
            self._needs_sync, self._assigned = self._enter(reason)

    def _enter(self, reason: str) -> tuple[bool, float]:
        return _enter(self._membership, self._state, reason, self._reset)


def _begin(membership: Member, state: State, assigned: float | None) -> None:
    """Report that training begins; `assigned` is when this process got its place in the generation."""
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


def _enter(membership: Member, state: State, reason: str, reset: Callable[[], object] | None) -> tuple[bool, float]:
    """Enter the next generation in which all ranks connect.

    Returns whether the state has to be synchronised, and when this process got its place in the generation.

    Args:
        membership: of this process.
        state: restored if something was lost.
        reason: what was lost; "" if the generation ended by agreement of its members.
        reset: starts the runtime; None: `context.init` alone does.
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
            if reset is not None:
                reset()
            runtime = context.init()
            rebind_all(runtime)
            if is_lost:
                state.restore()  # only now: the unfinished exchanges of the old world are discarded
            state.on_reset()
            notification_manager.repeat()  # the coordinator may have told of the next change already
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


def record_step(runtime: Context, membership: Member) -> None:
    """Measure the step that ends with this commit, for the beats and the timeline."""
    link = membership.link
    first_step_sec = link.step_timer.commit(waited_sec=runtime.recorder.waited_sec)
    if first_step_sec is not None:
        _record_phase(runtime, "FIRST_STEP", first_step_sec)
        link.tell()


_USUAL: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
}
"""The signals that the launcher passes on, and what Python does on each unless the script says otherwise."""


@contextmanager
def leaving_on_signals(membership: Member) -> Iterator[None]:
    """Make the first SIGTERM, SIGINT or SIGHUP a request to leave the job at the next commit.

    A second one ends the process as usual. A script that handles a signal itself keeps its handler. Children that are
    forked meanwhile, such as workers of a DataLoader, do on these signals what they would do without unidist.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = [number for number, usual in _USUAL.items() if signal.getsignal(number) == usual]
    owner = os.getpid()

    def ask(number: int, frame: FrameType | None) -> None:
        restore()
        if os.getpid() == owner:
            membership.link.leaving()
        else:  # a forked child
            signal.raise_signal(number)

    def restore() -> None:
        for number in replaced:
            if signal.getsignal(number) == ask:
                signal.signal(number, _USUAL[number])

    for number in replaced:
        signal.signal(number, ask)
    try:
        yield
    finally:
        restore()
