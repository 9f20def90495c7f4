"""Functions in threads, as scripts import them from `horovod.runner.util.threads`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["execute_function_multithreaded", "in_thread", "on_event"]


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function in a new thread, and return the thread.

    Args:
        target: the function.
        args: its arguments.
        name: of the thread.
        daemon: Python ends without waiting for it.
        silent: exceptions of the function are dropped, instead of printed.

    Raises:
        ValueError: `args` is no tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"in_thread(args={args!r}): give a tuple; for a single argument ({args!r},)")

    def call() -> None:
        with contextlib.suppress(BaseException) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call a function once, in a thread, as soon as an event is set; return the thread.

    Args:
        event: what is waited for.
        func: the function.
        args: its arguments.
        stop: another event: once it is set, the function is no longer called.
        check_stop_interval_s: how often `stop` is looked at, in seconds.
        daemon: Python ends without waiting for the thread; needs `stop` if not.
        silent: exceptions of the function are dropped, instead of printed.

    Raises:
        ValueError: no event, no tuple, or a thread that nothing could end.
    """
    if event is None:
        raise ValueError("on_event(event=None): give the event to wait for")
    if stop is None and not daemon:
        raise ValueError("on_event(daemon=False): give an event that stops the thread, stop=")
    until = threading.Event() if stop is None else stop

    def call(*given: Any) -> None:
        while not event.wait(check_stop_interval_s) and not until.is_set():
            pass
        if not until.is_set():
            func(*given)

    return in_thread(call, args, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call a function with each of several lists of arguments, in threads.

    Args:
        fn: the function.
        args_list: lists of arguments.
        block_until_all_done: wait for all calls. Else they go on in threads for which Python does not wait.
        max_concurrent_executions: number of threads at most.

    Returns:
        The results, by place in `args_list`; None without waiting.

    Raises:
        RuntimeError: a call raised; its exception is the cause.
    """
    calls = list(enumerate(args_list))
    if not calls:
        return {} if block_until_all_done else None
    if not block_until_all_done:
        waiting = iter(calls)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    call = next(waiting, None)
                if call is None:
                    return
                fn(*call[1])

        for _ in range(min(max_concurrent_executions, len(calls))):
            in_thread(work)
        return None
    with ThreadPoolExecutor(min(max_concurrent_executions, len(calls))) as threads:
        futures = {place: threads.submit(fn, *args) for place, args in calls}
    try:
        return {place: future.result() for place, future in futures.items()}
    except Exception as exc:
        raise RuntimeError(f"{getattr(fn, '__name__', fn)} failed in a thread: {exc}") from exc
