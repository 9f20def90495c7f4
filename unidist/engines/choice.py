"""Which engine carries a job: the one that was asked for, or the best of those that can. Says which and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta

from unidist.engine import EngineSpec
from unidist.errors import ConfigurationError
from unidist.registry import Registry
from unidist.rendezvous import MeetingPlace, Rendezvous
from unidist.settings.placement import Placement
from unidist.topology import Topology

_log = logging.getLogger("unidist.engine")

AUTO = "auto"


@dataclass(frozen=True)
class EngineChoice:
    """An engine, and why it was taken.

    Args:
        spec: the engine.
        memory: kind of memory that it is to move.
        reason: for a message.
        passed_over: better engines that fit the job but cannot be used here, with their reasons.
    """

    spec: EngineSpec
    memory: str
    reason: str
    passed_over: tuple[str, ...] = ()

    def tell(self) -> None:
        """Log the choice; a better engine that is broken is worth a warning."""
        _log.info("engine %s for %s memory: %s", self.spec.name, self.memory, self.reason)
        for text in self.passed_over:
            _log.warning("engine %s is used instead of %s", self.spec.name, text)


def choose(
    asked: str,
    memory: str,
    topology: Topology,
    engines: Registry[EngineSpec],
    *,
    elastic: bool = False,
    tls: bool = False,
) -> EngineChoice:
    """Return the engine for one kind of memory.

    Args:
        asked: an engine's name, or "auto". A named engine that can be used, but does not move this kind of memory
            (nccl and host memory), leaves the choice to "auto".
        memory: "host" or "cuda".
        topology: of this process.
        engines: what is registered.
        elastic: ranks of the job may be lost.
        tls: what leaves a host has to be encrypted.

    Raises:
        ConfigurationError: the engine asked for is unknown, cannot be used on this machine, or cannot connect this
            job, or reconnect it if it is elastic, or encrypt what it has to; or no engine can.
    """
    tls = tls and not topology.single_host
    if asked != AUTO:
        spec = engines.get(asked, hint="`unidist plugins` lists where they come from.")
        check_engine(spec, engines, elastic=elastic, tls=tls)
        engine = spec.load()
        for verdict in (engine.availability(), engine.supports(topology)):
            if not verdict.usable:
                raise ConfigurationError(
                    f"engine {asked!r} was asked for, but cannot be used: {verdict.reason}. "
                    "`unidist doctor` lists the engines that can."
                )
        if memory in spec.memory_kinds:
            return EngineChoice(spec, memory, "asked for")
    passed_over: list[str] = []
    refused: list[str] = []
    for spec in sorted(engines, key=lambda item: -item.priority):
        if spec.priority < 0 or memory not in spec.memory_kinds:
            continue
        if elastic and not spec.re_forms:
            refused.append(f"{spec.name} (it cannot reconnect when a rank is lost)")
            continue
        if tls and not spec.encrypts:
            refused.append(f"{spec.name} (it does not encrypt, as --tls asks for)")
            continue
        engine = spec.load()
        supported = engine.supports(topology)
        if not supported.usable:
            refused.append(f"{spec.name} ({supported.reason})")
            continue
        available = engine.availability()
        if available.usable:
            reason = f"the first choice for {topology.world_size} rank(s) on {topology.num_nodes} host(s)"
            return EngineChoice(spec, memory, reason, tuple(passed_over))
        passed_over.append(f"{spec.name} ({available.reason})")
    raise ConfigurationError(
        f"no engine moves {memory} memory between these {topology.world_size} ranks. "
        f"Looked at: {'; '.join(refused + passed_over) or 'none'}."
    )


def check_engine(spec: EngineSpec, engines: Registry[EngineSpec], *, elastic: bool, tls: bool) -> None:
    """Make sure that a job can use this engine.

    Args:
        spec: of the engine.
        engines: what is registered.
        elastic: ranks of the job may be lost.
        tls: the job has several hosts, and what leaves a host has to be encrypted.

    Raises:
        ConfigurationError: it cannot reconnect when a rank is lost, or does not encrypt; lists those that do.
    """
    if tls and not spec.encrypts:
        able = ", ".join(each.name for each in engines if each.encrypts) or "none"
        raise ConfigurationError(
            f"--tls: engine {spec.name!r} does not encrypt what it sends to other hosts; those that do: {able}. Leave "
            "--engine out, or --tls."
        )
    if elastic and not spec.re_forms:
        able = ", ".join(each.name for each in engines if each.re_forms) or "none"
        raise ConfigurationError(
            f"this job is elastic, and engine {spec.name!r} cannot reconnect the ranks when one is lost; those that "
            f"can: {able}. Leave --engine out, or launch without --min-np, --max-np and --host-discovery-script."
        )


def check_same(choice: EngineChoice, rendezvous: Rendezvous, topology: Topology, timeout: timedelta) -> None:
    """Check that all ranks chose the same engine. Collective.

    Raises:
        ConfigurationError: on every rank, with what each of them chose.
    """
    replies = rendezvous.allgather(choice.spec.name.encode(), timeout=timeout)
    names = [item.payload.decode() for item in replies]
    if len(set(names)) > 1:
        listed = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise ConfigurationError(
            f"the ranks chose different engines ({listed}). "
            "Install the same packages for every rank, or name one: --engine."
        )


def meeting_place(placement: Placement) -> MeetingPlace:
    """Return where the ranks of a job on several hosts meet.

    Raises:
        ConfigurationError: the launcher that started them gives no such place.
    """
    if placement.meeting_place is None:
        topology = placement.topology
        raise ConfigurationError(
            f"rank {topology.rank}: this job has {topology.world_size} ranks, {topology.local_size} of them here, and "
            f"was started by {placement.source}, under which the ranks of several hosts cannot meet. Start it with "
            "`unidist launch -H HOST:SLOTS,HOST:SLOTS`, or all ranks on one host."
        )
    return placement.meeting_place
