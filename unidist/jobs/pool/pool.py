"""Runs functions on many processes of this host: `unidist.run` once, `RankPool` again and again."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unidist.errors import ConfigurationError, UsageError
from unidist.jobs import preflight
from unidist.jobs.pool._call import PoolCall, PoolWorker
from unidist.jobs.pool._channel import WorkerChannel, send
from unidist.jobs.pool._output import RankPipe, is_notebook, show_rest
from unidist.jobs.pool._pickling import dump_call, dump_calls
from unidist.jobs.pool.answers import Answers, call_name
from unidist.jobs.processes import HostShare, LocalProcesses, watch_exit
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings

_START_SEC = 30.0
_EXIT_GRACE_SEC = 5.0
_TURN_SEC = 0.005
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from unidist.jobs.pool.worker import main; main()"


class RankPool:
    """Python processes that stand as the ranks of one job and run functions for this process.

    A context manager. Each rank runs one call at a time and keeps its state between calls; whether a
    function calls `init()` and `shutdown()` is its own matter. The ranks write to this process's standard
    output and error, and die with this process. In a notebook, what they print appears in the cell that waits for
    them, with the rank before each line. One thread at a time may use a pool.

    Args:
        num_proc: number of ranks.
        env: variables for every rank, on top of this process's.
        timeout: longest time for one call of `run`; None for no limit.
        engine: engine for the ranks, as `--engine`; None leaves it to the environment.
        share: the pool is this host's share of a job on several hosts, see `ClusterRank.share`: its ranks are those of
            the share, whose number `num_proc` is. None: ranks 0 to `num_proc` - 1 are the whole job.
        labels: this process shows what the ranks print, with the rank before each line, on `sys.stdout` and
            `sys.stderr`. It does so while it waits for a call. Default: in a notebook.

    Raises:
        ConfigurationError: see `LocalProcesses`.
    """

    def __init__(
        self,
        num_proc: int,
        *,
        env: Mapping[str, str] | None = None,
        timeout: timedelta | None = timedelta(seconds=120),
        engine: str | None = None,
        share: HostShare | None = None,
        labels: bool | None = None,
    ) -> None:
        self.num_proc = num_proc
        self._labels = is_notebook() if labels is None else labels
        self._timeout = timeout
        self._ended: str | None = None
        chosen = {} if engine is None else {"UNIDIST_ENGINE": engine}
        # Lines shall appear when they are printed, not when a buffer is full, as a pipe's would be.
        unbuffered = {"PYTHONUNBUFFERED": "1"} if self._labels else {}
        with ExitStack() as stack:
            variables = {**unbuffered, **(env or {}), **chosen}
            self._processes = stack.enter_context(LocalProcesses(num_proc, env=variables, share=share))
            ranks = range(num_proc) if share is None else [place.rank for place in share.places]
            self._workers = [self._start_worker(rank, stack) for rank in ranks]
            self._stack = stack.pop_all()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(worker.process.pid for worker in self._workers)

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        per_rank_args: Sequence[Sequence[Any]] | None = None,
        timeout: timedelta | None = None,
    ) -> list[Any]:
        """Call `func(*args, **kwargs)` on every rank at the same time and return the results in rank order.

        The pool stays usable when every rank has answered, be it with an exception; otherwise it is ended.

        Args:
            func: any function, also a lambda, a closure, or one of `__main__` or of a test module.
            args: positional arguments, equal on all ranks.
            kwargs: keyword arguments, equal on all ranks.
            per_rank_args: for each rank, further positional arguments after `args`.
            timeout: longest time for this call; default: the pool's.

        Raises:
            RemoteError: the function raised, or a rank died; says which rank and why. `__cause__` is the
                exception itself where it can be brought here.
            StalledError: ranks did not answer in time; names them. The pool is ended.
            UsageError: the call cannot be pickled, or the pool has ended.
        """
        limit = self._timeout if timeout is None else timeout
        answers = self.call(func, args, kwargs, per_rank_args=per_rank_args, timeout=timeout)
        return answers.results(timeout_sec=None if limit is None else limit.total_seconds())

    def call(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        per_rank_args: Sequence[Sequence[Any]] | None = None,
        timeout: timedelta | None = None,
    ) -> Answers:
        """Call a function as `run` does, and return the answers as they are, for somebody who passes them on.

        Raises:
            UsageError: the call cannot be pickled, or the pool has ended.
        """
        if self._ended is not None:
            raise UsageError(f"this RankPool cannot run anything more: {self._ended}. Make a new one.")
        if per_rank_args is not None and len(per_rank_args) != self.num_proc:
            raise UsageError(
                f"per_rank_args has {len(per_rank_args)} items for {self.num_proc} ranks; give one for each."
            )
        keywords = dict(kwargs or {})
        if per_rank_args is None:
            messages = [dump_call(func, tuple(args), keywords)] * self.num_proc
        else:
            messages = dump_calls(func, [(*args, *own) for own in per_rank_args], keywords)
        limit = self._timeout if timeout is None else timeout
        call = PoolCall(self._workers, call_name(func))
        try:
            call.run(messages, None if limit is None else limit.total_seconds())
        except BaseException:  # KeyboardInterrupt above all: the ranks are still at work on this call
            self._end("a call of it was interrupted", patient=False)
            raise
        if call.answers.lost_ranks:
            self._end(f"it lost ranks {call.answers.lost_ranks}", patient=False)
        return call.answers

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of one rank; nothing happens if it has ended."""
        self._workers[rank].process.send_signal(number)

    def close(self) -> None:
        """End all ranks and give everything back: no process, descriptor or thread stays. Idempotent."""
        self._end("it was closed", patient=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_worker(self, rank: int, stack: ExitStack) -> PoolWorker:
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        root = str(Path(__file__).resolve().parents[1])
        with theirs:
            command = [sys.executable, "-c", _BOOT, root, str(theirs.fileno())]
            stream = subprocess.PIPE if self._labels else None
            process = self._processes.start(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, pass_fds=(theirs.fileno(),)
            )
        pipes = tuple(
            RankPipe(f"[{rank}] ", file, is_error)
            for file, is_error in ((process.stdout, False), (process.stderr, True))
            if file is not None
        )
        ours.settimeout(_START_SEC)
        send(ours, pickle.dumps(list(sys.path)))
        exit_fd = watch_exit(process)
        if exit_fd is not None:
            stack.callback(os.close, exit_fd)
        return PoolWorker(rank, process, WorkerChannel(ours), exit_fd, pipes)

    def _end(self, reason: str, *, patient: bool) -> None:
        """Give everything back; `patient` lets ranks finish by themselves, as a script does at its end."""
        if self._ended is not None:
            return
        self._ended = reason
        pipes = [pipe for worker in self._workers for pipe in worker.pipes]
        with self._stack:
            if patient:
                for worker in self._workers:
                    worker.channel.close()
                deadline = time.monotonic() + _EXIT_GRACE_SEC
                for worker in self._workers:
                    while worker.process.poll() is None and time.monotonic() < deadline:
                        for pipe in pipes:  # a rank that finds its pipe full does not end
                            pipe.show()
                        time.sleep(_TURN_SEC)
        show_rest(pipes)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 2,
    *,
    strategy: str | None = None,
    engine: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: timedelta | None = None,
    labels: bool | None = None,
) -> list[Any]:
    """Run `func(*args, **kwargs)` on `num_proc` new processes of this host; return the results in rank order.

    The function is the whole training script of a rank: it calls `init()` itself. Processes are gone when
    this returns or raises.

    Args:
        func: any function, also a lambda, a closure or one of `__main__`.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of ranks.
        strategy: as `--strategy`; default: UNIDIST_STRATEGY.
        engine: as `--engine`; default: UNIDIST_ENGINE, else auto.
        env: variables for every rank.
        timeout: longest time for the whole; default: no limit. A rank that dies is noticed without it.
        labels: show the rank before each line that it prints; default: in a notebook.

    Raises:
        RemoteError: the function raised, or a rank died; `__cause__` is the exception where it can be brought here.
        StalledError: the timeout ran out; names the ranks that had not answered.
        ConfigurationError: an unknown engine or strategy, sizes that do not fit; nothing was started.
    """
    chosen = {"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}
    variables = {**(env or {}), **{name: value for name, value in chosen.items() if value is not None}}
    settings = Settings.read({**os.environ, **variables})
    if settings.strategy or settings.engine != preflight.AUTO or settings.allreduce_algorithm:
        manager = PluginManager(settings.disabled_plugins).load()
        plan = preflight.check(settings, num_proc, manager, environ={**os.environ, **variables})
        if needed := preflight.side_processes(plan):
            raise ConfigurationError(
                f"strategy={settings.strategy!r} needs processes beside the ranks ({needed[0].name}, ...), which "
                "`unidist launch` starts and unidist.run does not; use that, or leave the strategy out."
            )
    with RankPool(num_proc, env=variables, timeout=timeout, labels=labels) as pool:
        return pool.run(func, args, kwargs)
