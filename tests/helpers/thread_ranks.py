"""Ranks as threads of one process, each with its own runtime.

What belongs to a process in the product, the current context and the registration of the global process set, is
patched to belong to a thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from unittest import mock

from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist.settings.environment import Settings
from unidist.settings.placement import Placement
from unidist.testing.threads import ThreadWorld
from unidist.topology import Topology

R = TypeVar("R")

_jobs = itertools.count()
_here: Any = threading.local()


def run_ranks(size: int, function: Callable[[int], R], *, around: Callable[[int], Any] | None = None) -> list[R]:
    """Return what a function returns on each rank, of which each is a thread with a runtime.

    Args:
        size: number of ranks.
        function: is given the rank.
        around: makes a context manager for each rank, around its runtime.
    """
    job = f"threads {next(_jobs)} of {id(function)}"
    timeout = timedelta(seconds=60)
    settings = Settings(timeout=timeout, start_timeout=timeout, deadlock=timedelta(0))
    plugins = context._manager(())

    def main(communicator: Any) -> R:
        rank = communicator.rank
        topology = Topology(rank=rank, world_size=size, local_rank=rank, local_size=size)
        with nullcontext() if around is None else around(rank):
            generations = itertools.count()

            def start() -> context.Context:
                name = f"{job}, generation {next(generations)}"
                return context.Context(Placement(topology, "threads", name), settings, plugins)

            _here.start, _here.context = start, start()
            try:
                return function(rank)
            except BaseException as exc:
                _here.context.abort(f"rank {rank} raised {exc!r}")  # else the others wait for it
                raise
            finally:
                _here.context.close()
                del _here.context

    with _per_thread(), ThreadWorld(size) as world:
        return world.run(main, timeout=2 * timeout)


def start_next_runtime() -> context.Context:
    """Close the runtime of this rank, and start another one, as in an elastic job. Every rank calls it."""
    _here.context.close()
    _here.context = _here.start()
    return context.current()


@contextmanager
def _per_thread() -> Iterator[None]:
    def attribute(name: str) -> property:
        return property(
            lambda self: _here.__dict__.get((name, id(self))),
            lambda self, value: _here.__dict__.__setitem__((name, id(self)), value),
        )

    def current() -> context.Context:
        found: context.Context = _here.context
        return found

    def is_initialized() -> bool:
        return hasattr(_here, "context")

    with (
        mock.patch.object(context, "current", current),
        mock.patch.object(context, "is_current", lambda runtime: runtime is getattr(_here, "context", None)),
        mock.patch.object(context, "is_initialized", is_initialized),
        mock.patch.object(context, "_epochs", itertools.repeat(0)),
        mock.patch.object(ProcessSet, "scope", attribute("scope"), create=True),
        mock.patch.object(ProcessSet, "_registry", attribute("_registry"), create=True),
    ):
        yield
