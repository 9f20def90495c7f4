"""The rank side of the conformance suites: connect, run one case, close, and check for leaks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.rendezvous import Rendezvous, SingleRendezvous
from unidist.runtime.local_rendezvous import LocalRendezvous
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.placement import Placement, read_placement
from unidist.testing.leaks import Resources, leaked_since


@dataclass(frozen=True)
class EngineConnector:
    """Makes communicators of one engine on this rank, the way `init()` does, without a context.

    Args:
        engine: a registered engine's name.
        meeting: distinct for every run of a case; equal on all ranks.
        timeout: of the communicator.
        wrap: makes another communicator of the engine's; None uses that itself.
    """

    engine: str
    meeting: str
    timeout: timedelta
    wrap: Callable[[Communicator], Communicator] | None = None

    def connect(self, name: str = "", *, timeout: timedelta | None = None) -> Communicator:
        """Return a new world communicator. Collective; `name` is new at every call and the same on all ranks."""
        placement = read_placement()
        engine = PluginManager().load().engines.get(self.engine).load()
        for verdict in (engine.availability(), engine.supports(placement.topology)):
            if not verdict.usable:
                raise UsageError(f"engine {self.engine!r} cannot be tested here: {verdict.reason}")
        with ExitStack() as stack:
            rendezvous = self._meet(placement, name)
            stack.callback(rendezvous.close)
            communicator = engine.connect(placement.topology, rendezvous, timeout=timeout or self.timeout)
            if self.wrap is not None:
                communicator = self.wrap(communicator)
            # Some engines go on using it; so it lives as long as the communicator, as in a context.
            _rendezvous[id(communicator)] = stack.pop_all()
        return communicator

    def close(self, communicator: Communicator) -> None:
        """Close what `connect` returned."""
        communicator.close()
        _rendezvous.pop(id(communicator)).close()

    def _meet(self, placement: Placement, name: str) -> Rendezvous:
        topology = placement.topology
        if topology.world_size == 1:
            return SingleRendezvous()
        return LocalRendezvous(
            rank=topology.rank,
            world_size=topology.world_size,
            key=f"{placement.job_key}/{self.meeting}/{name}",
            secret=placement.secret,
            timeout=timedelta(seconds=60),
        )


_rendezvous: dict[int, ExitStack] = {}
_warm: set[tuple[str, bool, int]] = set()
_numbers = itertools.count()


def run_connecting(connector: EngineConnector, case: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run `case(connector, *args)` on this rank and make sure that it leaves nothing behind."""
    # With the size: of a process that served a smaller world before, the others have not been part.
    kind = (connector.engine, connector.wrap is None, read_placement().topology.world_size)
    if kind not in _warm:  # what an engine imports and starts once per process is no leak
        connector.close(connector.connect("warm-up"))
        _warm.add(kind)
    before = Resources.held()
    result = case(connector, *args)
    leaks = leaked_since(before)
    if leaks:
        raise AssertionError(f"{getattr(case, '__name__', case)} left behind: {'; '.join(leaks)}")
    return result


def run_connected(connector: EngineConnector, case: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run `case(communicator, *args)` on this rank over a fresh communicator; see `run_connecting`."""
    return run_connecting(connector, _with_communicator, (case, args))


def _with_communicator(connector: EngineConnector, case: Callable[..., Any], args: Sequence[Any]) -> Any:
    communicator = connector.connect("case")
    try:
        return case(communicator, *args)
    except BaseException as exc:
        communicator.abort(f"the case failed on rank {communicator.rank}: {exc}")  # the others need not wait in vain
        raise
    finally:
        connector.close(communicator)
