"""Operations that run in stages, each stage an operation of another communicator.

Every rank of such a communicator must post the stages in the same order, though each sees its own finish at other
times. So every stage has a *lane*, the communicator that it uses; an operation starts on a lane only after all earlier
operations that use the lane have. Operations pass their lanes in ascending order, so none waits in a circle.

A waiting thread drives the stages. A background thread drives them too, now and then, so that a rank that is busy or
waits for something else does not delay the others: some engines need every rank of an operation to drive it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from typing_extensions import override

from unidist.communicator import CompletedWork, Work

_PATIENCE = timedelta(milliseconds=1)
_BETWEEN = 1
"""The lane of what is under way between hosts; the others are inside one."""

_THREAD_PAUSE_SEC = 0.002
_LAST_JOIN_SEC = 1.0


class OperationStage(NamedTuple):
    """A part of an operation: `start` posts it on the communicator of `lane`, or does it at once and returns None."""

    lane: int
    start: Callable[[], Work | None]


class StagedWork(Work):
    """An operation in stages. Made by `OperationPipeline.post`."""

    def __init__(self, pipeline: OperationPipeline, what: str, stages: Iterable[OperationStage]) -> None:
        self._pipeline = pipeline
        self.what = what
        self.stages = deque(stages)
        self.current: Work | None = None
        self.lane = -1
        self.finished = False
        self.error: BaseException | None = None

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        pipeline = self._pipeline
        limit = pipeline.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        with pipeline.driven_here():
            while not self.done():
                if time.monotonic() > deadline:
                    pipeline.give_up(self, limit)
                    break
                pipeline.wait_briefly()
        if self.error is not None:
            raise self.error

    @override
    def done(self) -> bool:
        if not self.finished:
            self._pipeline.advance()
        return self.finished


class DirectWork(Work):
    """An operation of another communicator as it is, driven with the staged ones. Made by `OperationPipeline.adopt`."""

    def __init__(self, inner: Work) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.finished = False

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        with self._lock:  # the driver stays away meanwhile
            try:
                self._inner.wait(timeout)
            finally:
                self.finished = True

    @override
    def done(self) -> bool:
        if not self.finished and self._lock.acquire(blocking=False):
            try:
                self.finished = self._inner.done()
            except Exception:  # `wait` raises it, to whom it concerns
                self.finished = True
            finally:
                self._lock.release()
        return self.finished


class WorkOfParts(Work):
    """Several operations as one; they begin, and so end, in this order."""

    def __init__(self, parts: Sequence[Work]) -> None:
        self._parts = parts

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all stages; the timeout is for all of them together."""
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for part in self._parts:
            part.wait(None if deadline is None else timedelta(seconds=max(0.0, deadline - time.monotonic())))

    @override
    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class OperationPipeline:
    """The staged operations of one communicator, oldest first. Thread-safe.

    Args:
        timeout: of an operation.
        translate: makes the error that the operation raises of that of a stage; called once, with the lock held.
            It also ends the communicator, so that no peer waits for this rank.
        stalled: likewise, for an operation that took too long.
    """

    def __init__(
        self,
        timeout: timedelta,
        *,
        translate: Callable[[str, BaseException, int], BaseException],
        stalled: Callable[[str, timedelta], BaseException],
    ) -> None:
        self.timeout = timeout
        self._translate = translate
        self._stalled = stalled
        self._lock = threading.RLock()
        self._works: list[StagedWork] = []
        self._direct: list[DirectWork] = []
        self._num_waiting = 0
        _driver.open(self)

    @property
    def is_busy(self) -> bool:
        """Return whether there is anything to drive."""
        return not (all(work.finished for work in self._works) and all(work.finished for work in self._direct))

    @property
    def needs_driver(self) -> bool:
        """Return whether there is something to drive that no waiting thread drives."""
        return not self._num_waiting and self.is_busy

    @contextmanager
    def driven_here(self) -> Iterator[None]:
        """Within it this thread calls `advance` again and again; the background thread leaves the pipeline alone."""
        with self._lock:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
            if self.is_busy:
                _driver.wake()

    def adopt(self, inner: Work) -> Work:
        """Return an operation of one of the other communicators, which from now on moves on with the staged ones."""
        if isinstance(inner, CompletedWork):
            return inner
        work = DirectWork(inner)
        with self._lock:
            self._direct.append(work)
        _driver.wake()
        return work

    def post(self, what: str, stages: Iterable[OperationStage]) -> StagedWork:
        """Begin an operation; `what` names it in messages."""
        work = StagedWork(self, what, stages)
        with self._lock:
            self._works.append(work)
            self._advance()
            if not work.finished:
                _driver.wake()
        return work

    def advance(self) -> None:
        """Move all operations on as far as they go, unless another thread does."""
        if self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()

    def wait_briefly(self) -> None:
        """Sleep until something may have happened.

        Where something is under way inside the host, wait for that: an engine there may need this thread to move it.
        Those between hosts mostly move by themselves. Not for long, as what is waited for is one thing of several.
        """
        with self._lock:
            pending = [work for work in self._works if work.current is not None]
            work = min(pending, key=lambda each: each.lane == _BETWEEN, default=None)
            if work is None:
                time.sleep(0)
                return
            assert work.current is not None
            try:
                work.current.poll(_PATIENCE)
            except Exception:  # `_advance` meets it again, and makes it the operation's error
                time.sleep(0)

    def give_up(self, work: StagedWork, limit: timedelta) -> None:
        """End all operations, because one took too long."""
        with self._lock:
            if not work.finished:
                self._fail(self._stalled(work.what, limit))

    def end(self, error: BaseException) -> None:
        """End all operations with an error; there will be no more."""
        with self._lock:
            self._fail(error)
            self._direct.clear()
        _driver.close(self)

    def _advance(self) -> None:
        blocked: set[int] = set()
        for work in list(self._works):
            lane = -1
            try:
                while True:
                    if work.current is not None:
                        if not work.current.done():
                            break
                        work.current.wait()
                        work.current = None
                    if not work.stages:
                        work.finished = True
                        break
                    if work.stages[0].lane in blocked:
                        break
                    stage = work.stages.popleft()
                    lane = work.lane = stage.lane
                    work.current = stage.start()
            except Exception as exc:  # whatever a stage raises becomes the operation's own error
                self._fail(self._translate(work.what, exc, lane))
                return
            blocked.update(stage.lane for stage in work.stages)
        self._works = [work for work in self._works if not work.finished]
        self._direct = [work for work in self._direct if not work.done()]

    def _fail(self, error: BaseException) -> None:
        for work in self._works:
            if not work.finished:
                work.error, work.finished = error, True
        self._works.clear()


class _Driver:
    """The thread that drives operations that no thread waits for. It ends with the last pipeline and sleeps if idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipelines: weakref.WeakSet[OperationPipeline] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._is_busy = threading.Event()

    def open(self, pipeline: OperationPipeline) -> None:
        """Drive this pipeline from now on."""
        with self._lock:
            self._pipelines.add(pipeline)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unidist-hierarchy", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """A pipeline has something to do."""
        self._is_busy.set()

    def close(self, pipeline: OperationPipeline) -> None:
        """Drive this pipeline no more; the thread ends with the last one."""
        with self._lock:
            self._pipelines.discard(pipeline)
            thread = None
            if not self._pipelines:
                thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._is_busy.set()
            thread.join(_LAST_JOIN_SEC)

    def _run(self) -> None:
        while True:
            self._is_busy.wait()
            time.sleep(_THREAD_PAUSE_SEC)
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                pipelines = list(self._pipelines)
            self._is_busy.clear()
            while pipelines:  # no reference stays while it sleeps: what is forgotten may go
                pipeline = pipelines.pop()
                if pipeline.needs_driver:
                    pipeline.advance()
                    if pipeline.is_busy:
                        self._is_busy.set()
                del pipeline


_driver = _Driver()


def _forget_in_child() -> None:
    """A forked child has no thread, and drives nothing of its parent's."""
    global _driver
    _driver = _Driver()


os.register_at_fork(after_in_child=_forget_in_child)
