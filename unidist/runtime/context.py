"""The runtime of one process: made by `init()`, found by `current()`, ended by `shutdown()`.

The context is the only global object. It has the topology, the plan and the communicators, and owns everything that
has to be released.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from unidist.communicator import Communicator
from unidist.control.elastic import member
from unidist.errors import NotInitializedError, PeerLostError, UsageError
from unidist.mesh import REPLICA_AXES, SAMPLE_AXES, SHARD_REPLICA_AXES, Mesh
from unidist.negotiation import (
    NamedOperations,
    NegotiatesNames,
    NegotiationOptions,
    Negotiator,
    objects,
)
from unidist.negotiation.join import Announcements
from unidist.negotiation.process_sets import ProcessSet, ProcessSets, global_process_set
from unidist.rendezvous import MeetingPlace
from unidist.runtime.communicators import JobCommunicators, JobDevices
from unidist.runtime.plugin_manager import PluginManager
from unidist.runtime.progress import ProgressReporter
from unidist.runtime_api import Owned
from unidist.settings.environment import Settings, configure_logging
from unidist.settings.placement import Placement, ignored_tasks, read_placement
from unidist.settings.rank_process import ReportMemory, announce_rank_process
from unidist.strategy.interface import Plan
from unidist.strategy.plan import StrategyLike, build, make_plan
from unidist.timeline import Recorder, Timeline
from unidist.topology import Topology

_log = logging.getLogger("unidist")

OwnedT = TypeVar("OwnedT", bound=Owned)


class Context:
    """Everything that lives from `init()` to `shutdown()`. Created by `init()` only.

    Attributes:
        topology: this process's place.
        settings: the user's choices.
        plugins: the plugin manager.
        plan: the strategies of the command line, checked, and the mesh.
        world: communicator over all ranks, for host memory, for the script's own use.
        negotiator: runs named operations over all ranks, on a separate communicator.
        process_sets: the same over some of the ranks.
        announcements: of updates, for ranks that have joined.
        engine: the engine of the world communicator, and why it was chosen.
        has_strategies: the script has asked for the plan, which `distribute` and `TrainStep` do.
    """

    def __init__(self, placement: Placement, settings: Settings, plugins: PluginManager) -> None:
        self.topology: Topology = placement.topology
        self.membership = member.present() if placement.worker is not None else None
        """This process in an elastic job, in which a context lives as long as a generation; None in any other."""
        self.settings = settings
        self.plugins = plugins
        self.plan: Plan = make_plan(
            build(settings.strategy, plugins.strategies), self.topology.world_size, plugins.strategies
        )
        self._closing = ExitStack()
        self._owned: dict[Any, Any] = {}
        self._told_data_size: int | None = None
        self.has_strategies = False
        self.elastic_data: Any = None
        """The data of `shard` that was iterated over last, if it can be a `Redistributable` of `unidist.elastic`."""
        self.recorder = Recorder()
        if settings.timeline is not None:
            self.recorder.start(
                settings.timeline,
                rank=self.topology.rank,
                mark_cycles=settings.timeline_mark_cycles,
                per_tensor=settings.timeline_per_tensor,
            )
        self._closing.callback(self.recorder.stop)
        self.progress = ProgressReporter(
            self.topology.rank, ReportMemory.inherited(), self.recorder, counts_samples=self._is_first_of_model
        )
        """What this rank tells the launcher."""
        self._closing.callback(self.progress.close)
        self._communicators = JobCommunicators(
            placement,
            settings,
            plugins.engines,
            membership=self.membership,
            next_epoch=(lambda: next(_epochs)) if self.membership is None else self.membership.next_epoch,
            closing=self._closing,
        )
        try:
            self._communicators.connect()
            self.engine, self.world = self._communicators.engine, self._communicators.world
            self.negotiator = self._named_operations(self.duplicate_world())
            self._closing.callback(self.negotiator.close)
            self.process_sets = ProcessSets(
                self.topology, self.duplicate_world, self.negotiator, self._named_operations
            )
            self._closing.callback(self.process_sets.close)
            self.announcements = Announcements(self.negotiator)
        except BaseException:
            self.close()
            raise

    def communicator(self, memory: str = "host") -> Communicator:
        """Return the world communicator for a kind of memory ("host", "cuda"). Collective when first asked for."""
        return self._communicators.world_of(memory)

    def axis(self, name: str, *, memory: str = "host") -> Communicator:
        """Return the communicator along a mesh axis, for the script's and strategies' own use.

        Collective over all ranks when an axis is first asked for.
        """
        return self._communicators.axis(self.plan.mesh, name, memory)

    def new_communicator(self, axis: str, *, memory: str = "host") -> Communicator:
        """Return another communicator along a mesh axis, independent of all others. Collective over its ranks.

        The first one of an axis is collective over all ranks, see `divide`.
        """
        return self._communicators.new(self.plan.mesh, axis, memory)

    def divide(self, *, memory: str = "host") -> None:
        """Form the groups of all mesh axes. Collective over all ranks.

        Later communicators along an axis then come from its own group: what happens on one part of a divided model
        alone (a layer is unfrozen, buckets change their size) does not concern the others.
        """
        for name in (*self.plan.mesh.axes, SAMPLE_AXES, REPLICA_AXES, SHARD_REPLICA_AXES):
            self._communicators.group(self.plan.mesh, name, memory)

    def abort(self, reason: str) -> None:
        """End all pending and later operations of all communicators with PeerLostError, here and on their peers.

        For a rank that cannot go on in the middle of what the others wait for. Callable from any thread.
        """
        self._communicators.abort(reason)

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along a mesh axis, or a composite one."""
        return self.plan.mesh.size(name)

    def axis_rank(self, name: str) -> int:
        """Return this rank's place along a mesh axis, or a composite one; 0 on an axis that the mesh does not have."""
        return self.plan.mesh.place(name, rank=self.topology.rank)

    def data_place(self) -> tuple[int, int]:
        """Return this rank's place along the axes that divide samples, and their size.

        From the first call on, no strategy of the script's may change the size.
        """
        self._told_data_size = self.axis_size(SAMPLE_AXES)
        return self.axis_rank(SAMPLE_AXES), self._told_data_size

    def _is_first_of_model(self) -> bool:
        """Return whether no other rank that trains on the same samples comes before this one."""
        mesh = self.plan.mesh
        dividing = mesh.members(SAMPLE_AXES)
        coordinates = mesh.coordinates(self.topology.rank)
        return not any(place for name, place in coordinates.items() if name not in dividing)

    def plan_for(self, strategy: StrategyLike) -> Plan:
        """Return the plan for `strategy=`; None means the command line's.

        A script that was launched without strategies may choose the mesh, once and before a communicator along an axis
        is used; it is the runtime's from then on.
        """
        self.has_strategies = True
        if strategy is None:
            return self.plan
        registry = self.plugins.strategies
        plan = make_plan(build(strategy, registry), self.topology.world_size, registry)
        if plan.mesh.axes != self.plan.mesh.axes:
            if self.settings.strategy or self._communicators.has_divided:
                raise UsageError(
                    f"this strategy needs {plan.mesh}, but the job runs on {self.plan.mesh} already; give strategies "
                    "that claim mesh axes on the command line (--strategy), or before anything else is distributed"
                )
            told, size = self._told_data_size, plan.mesh.size(SAMPLE_AXES)
            if told is not None and told != size:
                raise UsageError(
                    f"this strategy needs {plan.mesh}, which divides samples over {size} rank(s), but data_rank(), "
                    f"data_size(), seed() or shard() have counted on {told} before: give strategies that divide the "
                    "model on the command line (--strategy), or distribute the model before"
                )
            self.plan = Plan(self.plan.strategies, plan.mesh)
        return plan

    def owned(self, kind: Callable[[Context], OwnedT]) -> OwnedT:
        """Return the one object of a class that belongs to this runtime; made when first asked for.

        Its `close` is called at `shutdown`, before the communicators are closed.
        """
        if kind not in self._owned:
            self._owned[kind] = made = kind(self)
            self._closing.callback(made.close)
        found: OwnedT = self._owned[kind]
        return found

    def duplicate_world(self) -> Communicator:
        """Return another communicator over all ranks, independent of all others. Collective."""
        return self._communicators.duplicate_world()

    def broadcast_object(self, value: Any, *, root: int = 0, name: str) -> Any:
        """Return the root's value on every rank, see `RuntimeAPI.broadcast_object`. Collective over all ranks."""
        return objects.broadcast_object(self.negotiator, value, root=root, name=name)

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged along axes."""
        return self.plan.mesh

    @property
    def on_nonfinite(self) -> str:
        """See `RuntimeAPI.on_nonfinite`."""
        return self.settings.on_nonfinite

    @property
    def is_elastic(self) -> bool:
        """True: ranks can fail, join or leave while the job is running."""
        return self.membership is not None

    @property
    def timeline(self) -> Timeline | None:
        """The timeline that is being recorded on this rank, or None."""
        return self.recorder.timeline

    def operations(self, process_set: ProcessSet | None = None) -> NamedOperations:
        """Return the named operations over a process set; None means all ranks."""
        if process_set is None or process_set is global_process_set:
            return self.negotiator
        return self.process_sets.operations(process_set)

    def join(self) -> int:
        """Take part in what the others do, with nothing to contribute, until all have joined; returns the last one."""
        return self.negotiator.join(self.announcements.serve)

    def report_failure(self, error: BaseException) -> None:
        """Tell plugins that an operation of this rank failed; the caller raises `error` to the script."""
        self.plugins.notify("unidist_failure", context=self, error=error)

    def when_stuck(self, end: Callable[[str], None]) -> None:
        """See `Monitor.when_stuck`."""
        self._communicators.monitor.when_stuck(end)

    def step_applied(self, step: int) -> None:
        """Tell plugins that an update was applied."""
        self.progress.step()
        self._communicators.monitor.num_updates += 1
        if self.plugins.listens("unidist_step_applied"):
            self.plugins.notify("unidist_step_applied", context=self, step=step)

    def close(self) -> None:
        """Give everything back, newest first. Idempotent."""
        self._communicators.begin_closing()
        self._closing.close()

    def _named_operations(self, communicator: Communicator) -> NamedOperations:
        options = NegotiationOptions(
            fusion_threshold_bytes=self.settings.fusion_threshold_bytes,
            cycle_time=self.settings.cycle_time,
            stall_check=timedelta(0) if self._communicators.monitor.reports else self.settings.stall_check,
            stall_shutdown=self.settings.stall_shutdown,
            cache_capacity=self.settings.cache_capacity,
            recorder=self.recorder,
            on_failure=self.report_failure,
            devices=JobDevices(self._communicators, of_all=communicator.size == self.topology.world_size),
        )
        names: NamedOperations
        if isinstance(communicator, NegotiatesNames):
            names = communicator.named_operations(options)
        else:
            names = Negotiator(communicator, options)
        names.observed = communicator.observed
        if names.observed is not None:
            names.observed.handles = {}
        return names


_lock = threading.Lock()
_current: Context | None = None
_epochs = itertools.count()
_managers: dict[tuple[str, ...], PluginManager] = {}


def init(settings: Settings | None = None) -> Context:
    """Start the runtime of this process, and return it. Collective: every rank of the job calls it.

    Called again without `shutdown()` in between, it returns the running context (as Horovod does).

    Args:
        settings: the user's choices; default: from the environment.

    Raises:
        ConfigurationError: environment, strategies or engine do not fit.
        StalledError: a rank did not come; names it.
    """
    global _current
    with _lock:
        if _current is not None:
            return _current
        configure_logging()
        if announce_rank_process():
            _freeze_imports()
        chosen = Settings.read() if settings is None else settings
        if tasks := ignored_tasks():
            _log.warning(
                "TF_CONFIG names %d processes that train together, and this one was started by no launcher that "
                "unidist knows: it trains alone. Start all of them by `unidist launch -np %d -H HOST:1,...`, and leave "
                "TF_CONFIG out",
                tasks,
                tasks,
            )
        context = _current = _connected(chosen)
    context.plugins.notify("unidist_initialized", context=context)
    return context


@functools.cache
def _freeze_imports() -> None:
    """Keep what was imported before the first `init()` out of Python's garbage collections.

    Frameworks bring some hundred thousand objects that stay until the process ends. Every full collection looks at them
    all, and so does the end of the process: with PyTorch it takes 0.4 s longer. Only where a launcher has started the
    process for its script, which begins with imports; a notebook may have data by then.
    """
    gc.freeze()


def _connected(settings: Settings) -> Context:
    """Return a context whose ranks are connected.

    In an elastic job, ranks that lose one of them before training has begun form the next generation here. Later
    `unidist.elastic.generations` does that, which restores the state as well.
    """
    plugins = _manager(settings.disabled_plugins)
    began = time.monotonic()
    while True:
        placement = _placement()
        try:
            return Context(placement, settings, plugins)
        except PeerLostError as exc:
            present = member.present()
            if present is None or present.assignment is None or present.generations is not None:
                raise
            assert placement.worker is not None
            if time.monotonic() - began > placement.worker.timeout.total_seconds():
                raise
            from unidist.control.elastic.membership import NO_STATE
            from unidist.control.elastic.worker_link import DismissedError

            reason = present.link.ended or str(exc)
        _log.info("init: %s", reason)
        try:
            present.next_world(NO_STATE, reason=reason)
        except DismissedError as exc:
            raise SystemExit(0) from exc


def _placement() -> Placement:
    """Return this process's place; in an elastic job that of the present generation."""
    placement = read_placement()
    worker = placement.worker
    if worker is None:
        return placement
    present = member.join(worker)
    return replace(
        placement,
        topology=present.topology,
        job_key=present.job_key,
        meeting_place=MeetingPlace(worker.server, worker.host_address, present.generation),
    )


def shutdown() -> None:
    """End the runtime of this process: close communicators, threads and files. Without `init()` it does nothing.

    Not collective: peers may already be gone. Memory from `empty()` stays valid.
    """
    global _current
    with _lock:
        context, _current = _current, None
    if context is not None:
        context.process_sets.forget_scopes()
        context.plugins.notify("unidist_shutdown", context=context)
        context.close()


def begin_job() -> None:
    """Shut down, and count runtimes from zero again: this process becomes a rank of another job."""
    global _epochs
    shutdown()
    _epochs = itertools.count()


def is_initialized() -> bool:
    """Return whether the runtime is up."""
    return _current is not None


def is_current(context: Context) -> bool:
    """Return whether this runtime is the one between `init` and `shutdown` now."""
    return context is _current


def current() -> Context:
    """Return the running context.

    Raises:
        NotInitializedError: `init()` was not called, or `shutdown()` was.
    """
    if _current is None:
        raise NotInitializedError("unidist is not initialized in this process; call init() first")
    return _current


def plugins() -> PluginManager:
    """Return the plugins of this process, before `init()` too."""
    return _manager((_current.settings if _current is not None else Settings.read()).disabled_plugins)


def engine_usable(name: str) -> bool:
    """Return whether an engine of this name is registered, and usable on this machine. Before `init()` too."""
    return any(spec.name == name and spec.load().availability().usable for spec in plugins().engines)


def _manager(disabled: tuple[str, ...]) -> PluginManager:
    """Return the plugin manager; entry points are read once per process."""
    if disabled not in _managers:
        _managers[disabled] = PluginManager(disabled).load()
    return _managers[disabled]


def _forget_in_child() -> None:
    """A forked child (a DataLoader worker) is no rank: it has no runtime and closes nothing of its parent's."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _orphans.append(_current)  # kept, so that nothing is finalised in the child
        _current.process_sets.forget_scopes()
        _current = None


_orphans: list[Any] = []
os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(shutdown)

__all__ = ["Context", "begin_job", "current", "engine_usable", "init", "is_initialized", "plugins", "shutdown"]
