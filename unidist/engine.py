"""The interface of engines, which move bytes between ranks and build the communicators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from unidist.buffer import HOST
from unidist.communicator import Communicator
from unidist.registry import load_object
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology

__all__ = [
    "Availability",
    "ConnectsPart",
    "Engine",
    "EngineSpec",
]


@dataclass(frozen=True)
class Availability:
    """Whether something can be used on this machine, and if not, why.

    Args:
        usable: whether it can be used.
        reason: one sentence: its version or details if it is usable, else what is missing and how to get it.
    """

    usable: bool
    reason: str = ""


class Engine(ABC):
    """Builds the world communicator of one job.

    Created without arguments when it is first needed; creating one is cheap. A trivial implementation is
    `unidist.engines.single.SingleEngine`.
    """

    @abstractmethod
    def availability(self) -> Availability:
        """Return whether this engine can be used on this machine. Called by `unidist doctor` and `--engine auto`.

        The launcher calls it, in a process of its own, before it starts the ranks of a job that asks for this engine.
        Must not start threads or open connections, nor import a framework that is not installed.
        """

    @abstractmethod
    def supports(self, topology: Topology) -> Availability:
        """Return whether it can connect these processes (for example: one host only). Pure."""

    @abstractmethod
    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Return the communicator over all processes of the job.

        Collective: every rank calls it once per `init()`, and may use `rendezvous` to exchange addresses.

        Args:
            topology: this process's place.
            rendezvous: exchanges small messages between the ranks.
            timeout: default timeout of the communicator's operations.

        Raises:
            ConfigurationError: the machine lacks something; says what.
            StalledError: a rank did not connect in time.
        """


class ConnectsPart(ABC):
    """Capability of an engine: connects some ranks of a job while the others do something else. Found by isinstance."""

    @abstractmethod
    def connect_part(
        self, topology: Topology, members: Sequence[int], rendezvous: Rendezvous, *, timeout: timedelta
    ) -> Communicator:
        """Return a communicator over some ranks. Collective over these alone.

        Args:
            topology: this process's place in the job.
            members: their ranks in the job, in the order of the rendezvous; the same on each, and this one among them.
            rendezvous: of the members.
            timeout: default timeout of the communicator's operations.

        Raises:
            As `Engine.connect`.
        """


@dataclass(frozen=True)
class EngineSpec:
    """An engine, not yet imported.

    Args:
        name: in `--engine`.
        path: "module:Class" of an `unidist.engine.Engine`.
        summary: one line for lists.
        memory_kinds: kinds of memory that it moves ("host", "cuda"), known without importing it.
        priority: `--engine auto` chooses the usable engine with the highest; below 0 only if it is named.
        re_forms: after the loss of a rank the others can close it, and connect again in the same process, as elastic
            jobs need.
        encrypts: it reads `Settings.tls`, and then sends nothing to another host that is not encrypted. Without it,
            jobs on several hosts with `--tls` refuse the engine.
    """

    kind: ClassVar[str] = "engine"
    hook: ClassVar[str] = "unidist_register_engines"

    name: str
    path: str
    summary: str
    memory_kinds: frozenset[str] = frozenset((HOST,))
    priority: int = 0
    re_forms: bool = False
    encrypts: bool = False

    def load(self) -> Engine:
        """Import the class and return a new engine."""
        engine: Engine = load_object(self.path, f"engine {self.name!r}")()
        return engine
