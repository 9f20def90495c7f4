"""The runtime as strategies, updates and plugins see it; `unidist.runtime.Context` implements it.

Everything that lives from `init()` to `shutdown()` is reached from here, so code that takes a `RuntimeAPI` can be
tested with a small fake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from unidist.communicator import Communicator
from unidist.framework import Framework
from unidist.mesh import Mesh
from unidist.registry import Registry, Spec
from unidist.timeline import Recorder
from unidist.topology import Topology

__all__ = ["Owned", "Plugins", "RuntimeAPI"]


class Owned(Protocol):
    """An object that a runtime owns, see `RuntimeAPI.owned`."""

    def close(self) -> None:
        """Release its resources and wait for its threads. Must not raise."""


S = TypeVar("S", bound=Spec)
OwnedT = TypeVar("OwnedT", bound=Owned)


class Plugins(Protocol):
    """The registries of this process, with everything that its plugins have registered."""

    def registry(self, kind: type[S]) -> Registry[S]:
        """Return all specs of one kind: `plugins.registry(EngineSpec)`."""

    def framework_of(self, model: Any) -> Framework:
        """Return the adapter of the framework that `model` belongs to.

        Raises:
            UsageError: no adapter knows it; lists the frameworks.
        """

    def binding(self, strategy: str, framework: Framework) -> Any:
        """Return a new instance of a strategy's binding to a framework, see `unidist.strategy.BindingSpec`.

        Each strategy documents a Protocol that its bindings must implement.

        Raises:
            ConfigurationError: no plugin has registered one; lists the frameworks that have one.
        """


class RuntimeAPI(Protocol):
    """The runtime of one process.

    "Collective" methods are called by every rank they name, in the same order.
    """

    @property
    def topology(self) -> Topology:
        """This process's place among all."""

    @property
    def mesh(self) -> Mesh:
        """The arrangement of the ranks along axes."""

    @property
    def on_nonfinite(self) -> str:
        """What happens when a gradient is not finite: "off" (nobody looks), "error", or "skip" the update."""

    @property
    def plugins(self) -> Plugins:
        """The registries with everything that plugins have registered."""

    @property
    def recorder(self) -> Recorder:
        """Writes the timeline, if one is recorded."""

    @property
    def is_elastic(self) -> bool:
        """Whether ranks can fail, join or leave while the job is running. The runtime then lives for one generation."""

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along a mesh axis, or a composite one (`unidist.mesh.REPLICA_AXES`)."""

    def axis_rank(self, name: str) -> int:
        """Return this rank's place along a mesh axis, or a composite one; 0 on an axis that the mesh does not have."""

    def axis(self, name: str, *, memory: str = "host") -> Communicator:
        """Return the common communicator along a mesh axis, or a composite one.

        The first call for an axis is collective over all ranks.
        """

    def new_communicator(self, axis: str, *, memory: str = "host") -> Communicator:
        """Return another communicator along a mesh axis, independent of all others. Collective over its ranks.

        The first one of an axis is collective over all ranks.
        """

    def duplicate_world(self) -> Communicator:
        """Return another communicator over all ranks, independent of all others. Collective."""

    def broadcast_object(self, value: Any, *, root: int = 0, name: str) -> Any:
        """Return the root's value on every rank. Collective over all ranks.

        Args:
            value: picklable (cloudpickle); ignored on other ranks than `root`.
            root: world rank.
            name: of the operation, the same on every rank; appears in messages and the timeline.
        """

    def abort(self, reason: str) -> None:
        """End all pending and later operations of all communicators with PeerLostError, here and on their peers.

        For a rank that cannot continue while the others wait for it. Callable from any thread.
        """

    def owned(self, kind: Callable[[Any], OwnedT]) -> OwnedT:
        """Return this runtime's only object of a class: `kind(runtime)`, made at the first call.

        Its `close` is called at `shutdown`, before the communicators are closed.
        """

    def report_failure(self, error: BaseException) -> None:
        """Tell plugins that an operation of this rank failed; the caller raises `error` to the script."""

    def step_applied(self, step: int) -> None:
        """Tell plugins that update number `step` (from 1) was applied."""
