"""State that can be committed, restored and synchronised, by Horovod's names; the framework-free part.

A job that loses a rank ends for now: the launcher does not replace ranks yet. What is here works in any job:
`sync` makes the ranks equal, `commit` and `restore` keep and bring back a state in memory.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from unidist import context, objects
from unidist.errors import PeerLostError

Result = TypeVar("Result")


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; raised by `commit` and `check_host_updates`, understood by `run`.

    Args:
        skip_sync: the state of the ranks that stay is equal already.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class State(ABC):
    """What training needs to go on: kept in memory by `commit`, made equal on all ranks by `sync`."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call these after the number of ranks has changed: to set the learning rate anew, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a new set of ranks, before the state is synchronised; `run` calls it."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the present state, to come back to, and look for changes of the hosts.

        Raises:
            HostsUpdatedInterrupt: hosts came or go.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:  # noqa: B027  # nothing to look at is a good answer
        """Raise HostsUpdatedInterrupt, on every rank alike, if hosts came or go. No launcher changes hosts yet."""

    @abstractmethod
    def save(self) -> None:
        """Keep the present state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Bring back the state that was kept."""

    @abstractmethod
    def sync(self) -> None:
        """Give every rank the state of rank 0. Collective."""

    def reset(self) -> None:  # noqa: B027  # nothing to adapt is a good answer
        """Adapt to a new set of ranks; by default there is nothing to adapt."""


class Handler(ABC):
    """Keeps, restores and synchronises one value that is more than a plain object (a model, say).

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    @abstractmethod
    def save(self) -> None:
        """See `State.save`."""

    @abstractmethod
    def restore(self) -> None:
        """See `State.restore`."""

    @abstractmethod
    def sync(self) -> None:
        """See `State.sync`; what is kept afterwards is what rank 0 has."""


class ObjectState(State):
    """State of plain objects, each an attribute: `ObjectState(epoch=0, batch=0)`.

    Args:
        handlers: values with a handler of their own, by attribute.
        values: the others, by attribute. They must be picklable (cloudpickle).
    """

    def __init__(self, handlers: Mapping[str, Handler] | None = None, **values: Any) -> None:
        super().__init__()
        self._handlers = dict(handlers or {})
        self._saved = values
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        self._restore_values()

    def save(self) -> None:
        """See `State.save`. Objects are copied, so that later changes do not reach what was kept."""
        for handler in self._handlers.values():
            handler.save()
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """See `State.restore`."""
        for handler in self._handlers.values():
            handler.restore()
        self._restore_values()

    def sync(self) -> None:
        """See `State.sync`; what every rank has afterwards is committed."""
        for handler in self._handlers.values():
            handler.sync()
        present = {name: getattr(self, name) for name in self._saved}
        operations = context.current().negotiator
        self._saved = objects.broadcast_object(operations, present, root=0, name="elastic.state")
        self._restore_values()

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a value; one with a handler is kept by it from now on."""
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.value = value
            handler.save()
        object.__setattr__(self, name, value)

    def _restore_values(self) -> None:
        for name, value in self._saved.items():
            object.__setattr__(self, name, copy.deepcopy(value))


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a training function `func(state, ...)`: its state is synchronised before it starts.

    Where a rank is lost, the committed state is restored and the error raised with that said: the launcher does not
    replace ranks yet. A HostsUpdatedInterrupt runs `on_reset`, and the function again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        skip_sync = False
        while True:
            if not skip_sync:
                state.sync()
            try:
                return func(state, *args, **kwargs)
            except PeerLostError as exc:
                state.restore()
                exc.add_note("The last committed state was restored. This job was not started to survive lost ranks.")
                raise
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            state.on_reset()

    return wrapper
