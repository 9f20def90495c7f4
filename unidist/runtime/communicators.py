"""The communicators of one runtime: how its ranks meet, are connected, divided along mesh axes, and let go together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import HOST
from unidist.engine import ConnectsPart
from unidist.engines import choice as engine_choice
from unidist.errors import ConfigurationError
from unidist.negotiation import CommunicatorRendezvous, DeviceConnector
from unidist.observation import observe
from unidist.rendezvous import Rendezvous, SingleRendezvous
from unidist.runtime.local_rendezvous import Interrupt, LocalRendezvous
from unidist.waits import Monitor, is_blocked

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.control.elastic import member
    from unidist.engine import EngineSpec
    from unidist.mesh import Mesh
    from unidist.registry import Registry
    from unidist.settings.environment import Settings
    from unidist.settings.placement import Placement

_log = logging.getLogger("unidist")


class JobDevices(DeviceConnector):
    """Connects named operations for the memory of devices.

    Args:
        communicators: of this runtime.
        of_all: the operations are over all ranks; False: over some of them.
    """

    def __init__(self, communicators: JobCommunicators, *, of_all: bool) -> None:
        self._communicators = communicators
        self._of_all = of_all

    @override
    def moves(self, kind: str) -> bool:
        return self._communicators.moves(kind, of_all=self._of_all)

    @override
    def connect(self, kind: str, host: Communicator) -> Communicator:
        return self._communicators.connect_beside(kind, host)


class JobCommunicators:
    """Makes the communicators of a runtime and keeps them, so that all of them can be aborted. First comes `connect`.

    Args:
        placement: this process's place.
        settings: the user's choices.
        engines: registered ones.
        membership: this process in an elastic job; None in any other.
        next_epoch: numbers the runtimes of a process, the same on every rank; called if there are several ranks.
        closing: closes what is made here.

    Attributes:
        engine: which engine carries host memory, and why.
        world: over all ranks, for host memory.
        monitor: notices when the ranks wait for each other.
    """

    engine: engine_choice.EngineChoice
    world: Communicator

    def __init__(
        self,
        placement: Placement,
        settings: Settings,
        engines: Registry[EngineSpec],
        *,
        membership: member.Member | None,
        next_epoch: Callable[[], int],
        closing: ExitStack,
    ) -> None:
        self._placement = placement
        self._topology = placement.topology
        self._settings = settings
        self._engines = engines
        self._membership = membership
        self._next_epoch = next_epoch
        self._closing = closing
        self._worlds: dict[str, Communicator] = {}
        self._axes: dict[tuple[tuple[str, ...], str], Communicator] = {}
        self._groups: dict[tuple[tuple[str, ...], str], Communicator] = {}
        self._made: list[Communicator] = []
        self._moved: dict[str, tuple[bool, bool]] = {}
        self._ended = ""
        self._ending = threading.RLock()  # what is being closed is not aborted: its memory may be gone
        self._is_closing = False
        self._interrupt: Interrupt | None = None
        self.monitor = Monitor(
            self._topology.rank,
            self._topology.world_size,
            patience=settings.deadlock,
            report_every=settings.stall_check,
            abort=self.abort,
            leaves_for_good=membership is None,
        )
        if membership is not None:
            membership.link.is_waiting = is_blocked
        closing.callback(self._made.clear)  # after they were closed: nothing to abort any more

    def connect(self) -> None:
        """Meet the other ranks and make `world`. Collective over all ranks."""
        if self._membership is not None:
            self._end_with_generation(self._membership)
        self._rendezvous = self._meet()
        self._closing.callback(self._rendezvous.close)
        self._closing.callback(self.monitor.close)
        self.monitor.start(self._rendezvous, self._placement.secret, timeout=self._settings.start_timeout)
        self.engine = self._choose(HOST)
        self.world = self._connect(HOST, self.engine)

    def world_of(self, memory: str) -> Communicator:
        """Return the communicator over all ranks for a kind of memory. Collective when first asked for."""
        kind = memory.partition(":")[0]
        if kind not in self._worlds:
            self._connect(kind, self._choose(kind))
        return self._worlds[kind]

    def duplicate_world(self) -> Communicator:
        """Return another communicator over all ranks, independent of all others. Collective."""
        duplicate = self.world.split(range(self.world.size))
        assert duplicate is not None
        return self._keep(duplicate)

    def axis(self, mesh: Mesh, name: str, memory: str) -> Communicator:
        """Return the communicator along an axis of the mesh. Collective over all ranks when first asked for."""
        key = (mesh.members(name), memory.partition(":")[0])
        if key not in self._axes:
            self._axes[key] = self.new(mesh, name, memory)
        return self._axes[key]

    def new(self, mesh: Mesh, name: str, memory: str) -> Communicator:
        """Return another communicator along an axis. Collective over its ranks; the first one over all ranks."""
        group = self.group(mesh, name, memory)
        made = group.split(range(group.size))
        assert made is not None
        return self._keep(made)

    def group(self, mesh: Mesh, name: str, memory: str) -> Communicator:
        """Return the communicator that those along an axis are made from. Collective over all ranks, the first time."""
        world = self.world_of(memory)
        members = mesh.group(name, rank=self._topology.rank)
        if len(members) == world.size:
            return world
        key = (mesh.members(name), memory.partition(":")[0])
        if key not in self._groups:
            made = world.split(members)
            assert made is not None
            self._groups[key] = self._keep(made)
        return self._groups[key]

    def moves(self, kind: str, *, of_all: bool = True) -> bool:
        """Return whether named operations leave this kind of memory where it is: see `DeviceConnector.moves`.

        Args:
            kind: of memory.
            of_all: operations over all ranks; False: over some of them.
        """
        if kind not in self._moved:
            try:
                spec = self._choose(kind).spec
            except ConfigurationError:
                self._moved[kind] = False, False
            else:
                stays = HOST not in spec.memory_kinds  # else it goes through host memory anyway
                self._moved[kind] = stays, stays and isinstance(spec.load(), ConnectsPart)
        return self._moved[kind][not of_all]

    def connect_beside(self, kind: str, host: Communicator) -> Communicator:
        """Return a communicator for a kind of memory over the ranks of another one, see `DeviceConnector.connect`."""
        choice, timeout = self._choose(kind), self._settings.start_timeout
        meeting = CommunicatorRendezvous(host, address=self._rendezvous.address, secret=self._rendezvous.secret)
        engine_choice.check_same(choice, meeting, self._topology, timeout)
        engine = choice.spec.load()
        if host.size == self._topology.world_size:
            made = engine.connect(self._topology, meeting, timeout=self._settings.timeout)
        else:
            assert isinstance(engine, ConnectsPart), "asked for in `moves`"
            made = engine.connect_part(self._topology, host.members, meeting, timeout=self._settings.timeout)
        return self._keep(made)

    @property
    def has_divided(self) -> bool:
        """There are communicators along axes: the mesh is settled."""
        return bool(self._axes or self._groups)

    def abort(self, reason: str) -> None:
        """End all operations of all communicators with PeerLostError, unless they are being closed. From any thread."""
        with self._ending:
            if self._is_closing:
                return
            made = list(dict.fromkeys([*reversed(self._made), *self.monitor.communicators]))
            for communicator in made:
                try:
                    communicator.abort(reason)
                except Exception:  # one that is closed, or half closed: the others count
                    _log.debug("aborting %s failed", communicator.description, exc_info=True)

    def begin_closing(self) -> None:
        """Abort nothing from now on; this rank enters nothing more."""
        self.monitor.leave()
        with self._ending:
            self._is_closing = True

    def _keep(self, communicator: Communicator) -> Communicator:
        self._made.append(communicator)
        self._closing.callback(communicator.close)
        if self._ended:
            communicator.abort(self._ended)  # the generation ended while it was being made
        return communicator

    def _end_with_generation(self, membership: member.Member) -> None:
        """Have everything that waits for a peer end when the coordinator says that the generation has."""
        self._interrupt = interrupt = Interrupt()
        self._closing.callback(interrupt.close)

        def end(reason: str) -> None:
            with self._ending:
                if not self._is_closing:
                    self._ended = reason or "this generation has ended"
                    interrupt.set(self._ended)
                    self.abort(self._ended)

        self._closing.callback(membership.interrupt_by(end))

    def _meet(self) -> Rendezvous:
        topology, placement = self._topology, self._placement
        if topology.world_size == 1:
            return SingleRendezvous()
        epoch = self._epoch = self._next_epoch()
        if not topology.single_host:
            from unidist.control.rendezvous import ControlRendezvous

            return ControlRendezvous(
                engine_choice.meeting_place(placement),
                topology,
                epoch=epoch,
                secret=placement.secret,
                timeout=self._settings.start_timeout,
            )
        return self._meet_here(topology.rank, topology.world_size, f"{epoch}")

    def _meet_on_host(self, kind: str) -> Rendezvous:
        """Meet the ranks of this host, in a job that has others."""
        if self._topology.local_size == 1:
            return SingleRendezvous()
        place = self._topology  # with the node: two of them may be one machine, under other launchers than ours
        return self._meet_here(place.local_rank, place.local_size, f"{self._epoch}/{kind}/{place.node_rank}")

    def _meet_here(self, rank: int, size: int, name: str) -> Rendezvous:
        return LocalRendezvous(
            rank=rank,
            world_size=size,
            key=f"{self._placement.job_key}/{name}",
            secret=self._placement.secret,
            timeout=self._settings.start_timeout,
            interrupt=self._interrupt,
        )

    def _choose(self, kind: str) -> engine_choice.EngineChoice:
        return engine_choice.choose(
            self._settings.engine,
            kind,
            self._topology,
            self._engines,
            elastic=self._membership is not None,
            tls=self._settings.tls,
        )

    def _connect(self, kind: str, choice: engine_choice.EngineChoice) -> Communicator:
        settings, topology = self._settings, self._topology
        engine_choice.check_same(choice, self._rendezvous, topology, settings.start_timeout)
        if topology.rank == 0:
            choice.tell()
        engine = choice.spec.load()
        world = engine.connect(topology, self._rendezvous, timeout=settings.timeout)
        if settings.hierarchical and kind == HOST and not topology.single_host:
            from unidist.hierarchical import connect_hosts

            world, meeting = connect_hosts(
                world,
                topology,
                self._rendezvous,
                meet_on_host=lambda: self._meet_on_host(kind),
                engines=self._engines,
                timeout=settings.start_timeout,
            )
            if meeting is not None:
                self._closing.callback(meeting.close)
        self._keep(observe(world, kind, self.monitor))
        if settings.allreduce_algorithm is not None and kind == HOST:  # their arithmetic is that of the host
            from unidist.algorithms import AlgorithmCommunicator

            algorithm = settings.allreduce_algorithm
            world = self._keep(observe(AlgorithmCommunicator(world, algorithm), f"{kind}/{algorithm}", self.monitor))
        self._worlds[kind] = world
        return world
