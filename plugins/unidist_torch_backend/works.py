"""The objects that PyTorch gets for an operation in progress: works to wait for, and their futures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.futures import Future

from unidist.communicator import Work
from unidist.errors import StalledError
from unidist_torch_backend.completion import Completion
from unidist_torch_backend.messages import GroupReceiveWork

_Base: Any = dist.Work
_c10d: Any = _distributed_c10d  # not all of it is annotated
_UNSET = timedelta(0)
_TURN = timedelta(milliseconds=1)
"""For which the group's thread stays with an operation that waits for a peer."""
_LATE = timedelta(milliseconds=1)
"""For an operation whose time is up: the wait that makes the communicator say who is missing."""


class GroupFuture(Future[Any]):
    """A future whose callbacks run on the group's thread, in the order in which the script attached them.

    A callback that is attached after the script has waited runs at once, as PyTorch's do: that is the program's order,
    too. Not so where the operation happens to be complete, which depends on the rank.

    A failed one raises the error from `wait` and `value`; in C++ (DistributedDataParallel) reading it raises
    RuntimeError with the error's text.

    Args:
        completion: the group's thread.
        is_message: it waits for a message, and operations that were issued later do not wait for it.

    Attributes:
        was_awaited: the script has waited for it, or for its operation.
    """

    def __init__(self, completion: Completion, *, is_message: bool = False) -> None:
        super().__init__()
        self._completion = completion
        self._is_message = is_message
        self.was_awaited = False

    def wait(self) -> Any:
        """Return the value when it is there, or raise the operation's error."""
        try:
            return super().wait()
        finally:
            self.was_awaited = True

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Return the future of what `callback` returns, which gets this future when it is complete."""
        child = GroupFuture(self._completion, is_message=self._is_message)
        task = _Callback(self, callback, child)
        if self.was_awaited:
            with contextlib.suppress(Exception):
                super().wait()  # another thread may be about to complete it
            child.was_awaited = True
            task.poll()
        elif not (self._completion.is_current and task.poll()):
            (self._completion.add_message if self._is_message else self._completion.add)(task)
        return child

    def add_done_callback(self, callback: Callable[[Future[Any]], Any]) -> None:
        """Call `callback` with this future when it is complete."""
        self.then(callback)

    def succeed(self, value: object) -> None:
        """Complete it with a value."""
        self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Complete it with an error."""

        def raise_error(_: object) -> None:
            raise error

        self._set_unwrap_func(raise_error)
        self.set_result(_Failure(error))


class _Failure:
    """Stands for the value of a failed future: C++ pickles it to find its tensors, and meets the error so."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error

    def __repr__(self) -> str:
        """Name the error: this is what C++ says when it needs a tensor."""
        return f"<{type(self.error).__name__}: {self.error}>"


class _Callback:
    """A callback that runs when a future is complete."""

    def __init__(self, future: GroupFuture, callback: Callable[[Future[Any]], Any], child: GroupFuture) -> None:
        self._future = future
        self._callback = callback
        self._child = child

    @property
    def is_over(self) -> bool:
        """See `CompletionTask.is_over`."""
        return self._future.done()

    def poll(self) -> bool:
        """Run it, if the future is complete."""
        if not self._future.done():
            return False
        try:
            value = self._callback(self._future)
        except Exception as exc:
            self._child.fail(exc)
        else:
            self._child.succeed(value)
        return True


class CallWork(_Base):
    """Operations of a communicator that belong to one call.

    Args:
        works: the communicator's.
        result: the tensors that hold the result.
        finishes: called once, in order, by the first thread that finds all of them complete.
        limit: longest wait.
        completion: the group's thread, which completes it if nobody waits.
        is_message: see `GroupFuture`.
    """

    def __init__(
        self,
        works: Sequence[Work],
        result: Sequence[torch.Tensor],
        finishes: Sequence[Callable[[], None]],
        limit: timedelta,
        completion: Completion,
        *,
        is_message: bool = False,
    ) -> None:
        super().__init__()
        self._is_message = is_message
        self._works = works
        self._result = result
        self._finishes = finishes
        self._limit = limit
        self._deadline = time.monotonic() + limit.total_seconds()
        self._completion = completion
        self._lock = threading.Lock()
        self._is_done = False
        self._is_awaited = False
        self._was_awaited = False
        self._error: BaseException | None = None
        self._future: GroupFuture | None = None
        self._is_resolved = False  # the future is complete, or one thread is about to complete it

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Return True when the result is there, or raise the operation's error.

        Args:
            timeout: longest wait; default: that of the call, or of the group.
        """
        if not self._is_done:
            self._is_awaited = True
            with self._lock:
                self._settle(timeout or self._limit)
        self._was_awaited = True
        if self._future is not None:
            self._future.was_awaited = True
        self._resolve()  # C++ asks for the future's value right after this
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._is_done or self._advance()

    def is_success(self) -> bool:
        """Return whether it is complete, without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error, if it is complete with one."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return list(self._result)

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait: the CPU has no streams."""
        self.wait()

    def source_rank(self) -> int:
        """Return the sender of a received message; -1 for other operations."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the result's tensors."""
        if self._completion.is_current:  # a callback, in which nobody else would complete it
            with self._lock:
                if not self._is_done:
                    self._settle(self._limit)
        with self._lock:
            if self._future is None:
                self._future = GroupFuture(self._completion, is_message=self._is_message)
        if self._is_done:
            self._resolve()
        self._future.was_awaited = self._was_awaited
        return self._future

    def get_future_result(self) -> Future[Any]:
        """Return `get_future()`."""
        return self.get_future()

    def boxed(self) -> Any:
        """Return the work for compiled code, which does not keep this object: complete."""
        self.wait()
        done: Future[Any] = Future()
        done.set_result(list(self._result))
        return _c10d._create_work_from_future(done).boxed()

    @property
    def is_over(self) -> bool:
        """See `CompletionTask.is_over`."""
        return self._is_done

    def poll(self) -> bool:
        """Complete the future if the operations are complete; the group's thread calls this."""
        if not self._is_done and not self._advance():
            return False
        self._resolve()
        return True

    def _advance(self) -> bool:
        """Move it on, unless another thread is waiting for it; return whether it is complete.

        The group's thread stays with it for a while. Any other one returns at once.
        """
        is_helper = self._completion.is_current
        if is_helper and self._is_awaited:
            with self._lock:  # until the thread that waits has it
                return self._is_done
        if not self._lock.acquire(blocking=is_helper):
            return self._is_done
        try:
            return self._is_done or self._try(_TURN if is_helper else None)
        finally:
            self._lock.release()

    def move(self, limit: timedelta) -> None:
        """Move it on from the calling thread, for so long at most. Never raises."""
        with self._lock:
            self._try(limit)

    def _try(self, limit: timedelta | None) -> bool:
        """Complete it if that takes no longer than `limit` for each operation; without one, if nothing is left to do.

        With the lock held.
        """
        late = time.monotonic() >= self._deadline
        try:
            if not late and not all(work.done() if limit is None else work.poll(limit) for work in self._works):
                return False
        except Exception as exc:
            self._end(exc)
            return True
        self._settle(_LATE if late else self._limit)
        return True

    def _settle(self, limit: timedelta) -> None:
        """Wait for the operations. With the lock held."""
        if self._is_done:
            return
        try:
            for work in self._works:
                work.wait(limit)
            for finish in self._finishes:
                finish()
        except StalledError as exc:
            waited = self._limit if limit is _LATE else limit
            text = str(exc).replace(f"{_LATE.total_seconds():g} s", f"{waited.total_seconds():g} s")
            self._end(StalledError(text, ranks=exc.ranks))
        except Exception as exc:
            self._end(exc)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._works = ()
        self._finishes = ()
        self._is_done = True

    def _resolve(self) -> None:
        """Complete the future, once, if there is one: without the lock, for callbacks may wait for this work."""
        with self._lock:
            future = self._future
            if future is None or self._is_resolved:
                return
            self._is_resolved = True
        if self._error is None:
            future.succeed(list(self._result))
        else:
            future.fail(self._error)


class MessageWork(CallWork):
    """The work of a message.

    Attributes:
        pending: of a message that is received.
    """

    pending: GroupReceiveWork | None = None

    def source_rank(self) -> int:
        """Return who sent the message, when it is there."""
        return -1 if self.pending is None else self.pending.receive.sender

    _source_rank = source_rank


class FinishedWork(_Base):
    """A call that was complete when it returned.

    Args:
        result: the tensors that hold the result.
    """

    def __init__(self, result: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return list(self._result)

    def synchronize(self) -> None:
        """Return at once."""

    def source_rank(self) -> int:
        """Return -1."""
        return -1

    def get_future(self) -> Future[Any]:
        """Return a complete future of the result's tensors."""
        future: Future[Any] = Future()
        future.set_result(list(self._result))
        return future
