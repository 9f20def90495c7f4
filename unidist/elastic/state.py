"""State that can be committed, restored and synchronised, by Horovod's names; the framework-free part.

What is here works in any job: `sync` makes the ranks equal, `commit` and `restore` keep and bring back a state in
memory. In an elastic one, `run` goes on with it after ranks were lost or came (`unidist.elastic.generations`).
"""

from __future__ import annotations

import copy
import functools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.reader import Convert
from unidist.checkpoint.plain_state import PlainState
from unidist.elastic.durable.checkpoints import Durable
from unidist.elastic.durable.commit_agreement import agree_at_commit
from unidist.elastic.durable.parts import DurableParts
from unidist.elastic.peer.memory import PeerMemory, peers_of
from unidist.errors import PeerLostError, UsageError
from unidist.launcher import AUTO, DurableOptions, interval_of
from unidist.negotiation import objects
from unidist.runtime import context

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
        self.num_commits += 1
        self.check_host_updates_at_commit()

    def check_host_updates_at_commit(self) -> None:
        """Look for changes of the hosts, and make a durable checkpoint of the commit if one is due."""
        if self.durable is None:
            self.check_host_updates()
            return
        self.durable.step()
        self.check_host_updates()
        self.durable.save_if_agreed(self)

    keeps_shares = False
    """Each rank has a share only of some value: after every change of the world the state is synchronised."""

    num_commits = -1
    """Commits that this state has seen, on whatever rank: whose is largest is furthest. Below 0: it was never equal."""

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on every rank alike, if others wait to come, or some are to go.

        Collective in an elastic job: every rank calls it, or `commit`, equally often.
        """
        runtime, durable = context.current(), self.durable
        wants_checkpoint = durable is not None and durable.is_wanted
        if runtime.membership is not None and runtime.membership.assignment is not None:
            from unidist.elastic.generations import ask_for_change

            agreed = ask_for_change(runtime, runtime.membership, checkpoint=wants_checkpoint)
        elif durable is not None:
            agreed = agree_at_commit(runtime, checkpoint=wants_checkpoint)
        else:
            return
        if durable is not None:
            durable.agreed(self, agreed)
        if agreed.change:
            raise HostsUpdatedInterrupt(skip_sync=False)

    # Durable checkpoints, see `unidist.elastic.durable.checkpoints`

    durable: Durable | None = None
    """Makes them; None: there are none."""

    def checkpoint_to(
        self, folder: str | os.PathLike[str], *, interval: float | Literal["auto"] = AUTO, keep: int = 2
    ) -> None:
        """Make durable checkpoints of this state, and begin from the latest one, in the function that `run` wraps.

        Every rank calls it alike, before that function; it wins over `--checkpoint-dir`.

        Args:
            folder: of its own, in a file system that all ranks share.
            interval: seconds between two of them; "auto": as often as they take less than 3.5 % of the time.
            keep: complete ones that stay.

        Raises:
            ConfigurationError: a value is out of range.
        """
        self.durable = Durable(DurableOptions(Path(os.path.abspath(folder)), interval_of(interval), keep))

    def durable_parts(self) -> DurableParts:
        """Return what a durable checkpoint of this state consists of.

        Raises:
            UsageError: states of this kind have none.
        """
        raise UsageError(
            f"{type(self).__name__} cannot be put into checkpoints: use TorchState, KerasState or ObjectState, or "
            "leave --checkpoint-dir and checkpoint_to out"
        )

    def begin_generation(self, progress: int, *, needs_sync: bool) -> None:
        """Become equal on all ranks, by `sync` or from a checkpoint; `run` calls it before the function. Collective.

        Args:
            progress: commits that the state of rank 0 has seen; 0: it is that of the script's beginning.
            needs_sync: not all ranks have that state.

        Raises:
            StateLostError: ranks have lost a share of the state, and there is no checkpoint.
            CheckpointError: the latest checkpoint cannot be loaded into this state.
        """
        options = context.current().settings.durable
        if self.durable is None and options is not None:
            self.durable = Durable(options)
        if self.durable is not None:
            self.durable.begin(self, progress, needs_sync=needs_sync)
            return
        if needs_sync:
            self.sync()
        self.num_commits = progress

    def finish(self) -> None:
        """Training has come to its end: make a checkpoint of what it came to, where there are any. Collective."""
        if self.durable is not None:
            self.durable.finish(self)

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
        """See `State.sync`. `ObjectState` saves when all values are there, so that a commit is never half another's."""


class SharedHandler(Handler):
    """For a value of which each rank has a share only. Its state keeps all of these together, see `PeerMemory`.

    Args:
        value: the value.
        states: what the value takes to a checkpoint, by section: asked anew each time.
        convert: of the framework, see `Framework.convert`.
    """

    def __init__(
        self, value: Any, states: Callable[[Any], Mapping[str, KeepsState]], convert: Convert | None = None
    ) -> None:
        self._states = states
        self.convert = convert
        super().__init__(value)

    def states(self, name: str) -> dict[str, KeepsState]:
        """Return the states of the value that the state has under this name, by section."""
        return {f"{name}.{section}": state for section, state in self._states(self.value).items()}

    def save(self) -> None:
        """Nothing: see `ObjectState.save`."""

    def restore(self) -> None:
        """Nothing: see `ObjectState.restore`."""

    def sync(self) -> None:
        """Nothing: see `ObjectState.sync`."""


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
        shared = [handler for handler in self._handlers.values() if isinstance(handler, SharedHandler)]
        self._shares = PeerMemory(shared[0].convert) if shared else None
        self._kept_in: weakref.ref[context.Context] | None = None
        self._keep_shares()

    @property
    def keeps_shares(self) -> bool:  # type: ignore[override]  # which is a constant where there are no handlers
        """See `State.keeps_shares`."""
        return self._shares is not None

    def commit(self) -> None:
        """See `State.commit`. Collective where each rank has a share only of some value."""
        self.save()
        self.num_commits += 1
        if self._shares is not None:
            self._shares.forget_older()
        self.check_host_updates_at_commit()

    def check_host_updates(self) -> None:
        """See `State.check_host_updates`."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            if self._shares is not None:
                self.save()  # where those that leave have a share, others must have it
            raise

    def save(self) -> None:
        """See `State.save`. Objects are copied, so that later changes do not reach what was kept."""
        self._keep_shares()  # first: with a rank it may fail
        for handler in self._handlers.values():
            handler.save()
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """See `State.restore`. Where the world has changed, shares are fetched from their holders by `sync`."""
        if self._shares is not None and self._is_divided_for(context.current()):
            self._shares.restore(self._states())
        for handler in self._handlers.values():
            handler.restore()
        self._restore_values()

    def sync(self) -> None:
        """See `State.sync`; what every rank has afterwards is committed."""
        runtime = context.current()
        if self._shares is not None and not self._is_divided_for(runtime):
            self._shares.load(peers_of(runtime), self._states())
        for handler in self._handlers.values():
            handler.sync()
        present = {name: getattr(self, name) for name in self._saved}
        received = objects.broadcast_object(runtime.negotiator, present, root=0, name="elastic.state")
        self._keep_shares()
        for handler in self._handlers.values():
            handler.save()
        self._saved = received
        self._restore_values()

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a value; one with a handler is kept by it from now on."""
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.value = value
            handler.save()
        object.__setattr__(self, name, value)

    def _keep_shares(self) -> None:
        if self._shares is not None:
            runtime = context.current()
            self._shares.commit(peers_of(runtime), self._states())
            self._kept_in = weakref.ref(runtime)

    def _is_divided_for(self, runtime: context.Context) -> bool:
        """Say whether the shares that were kept last are those of the present ranks."""
        return self._kept_in is not None and self._kept_in() is runtime

    def durable_parts(self) -> DurableParts:
        """See `State.durable_parts`; values with a handler are those of the frameworks' own states."""
        if self._handlers:
            return super().durable_parts()
        return DurableParts(self._plain_sections())

    def _plain_sections(self) -> dict[str, KeepsState]:
        """Return the section of the plain values. `load` takes them to be committed."""

        def put(values: dict[str, Any]) -> None:
            for name, value in values.items():
                object.__setattr__(self, name, value)

        is_writer = context.current().topology.rank == 0
        return {
            "extra": PlainState(lambda: {name: getattr(self, name) for name in self._saved}, put, is_writer=is_writer)
        }

    def _states(self) -> dict[str, KeepsState]:
        found: dict[str, KeepsState] = {}
        for name, handler in self._handlers.items():
            if isinstance(handler, SharedHandler):
                found |= handler.states(name)
        return found

    def _restore_values(self) -> None:
        for name, value in self._saved.items():
            object.__setattr__(self, name, copy.deepcopy(value))


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a training function `func(state, ...)`: its state is synchronised before it starts.

    In a job that was launched as elastic (`unidist launch --min-np`), the loss of a rank, or a change of the hosts,
    ends the function; the other ranks restore the last commit, form a world anew, run `on_reset`, synchronise the
    state, and call the function again. In any other job the committed state is restored and the error raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        membership = context.current().membership
        if membership is None:
            return _run_once(func, state, *args, **kwargs)
        from unidist.elastic.generations import run_through_generations

        return run_through_generations(membership, func, state, *args, **kwargs)

    return wrapper


def _run_once(func: Callable[..., Result], state: State, *args: Any, **kwargs: Any) -> Result:
    """Run in a job whose ranks do not change; an interrupt of the script's own is understood all the same."""
    state.begin_generation(0, needs_sync=True)
    while True:
        try:
            result = func(state, *args, **kwargs)
            state.finish()
            return result
        except PeerLostError as exc:
            if state.durable is not None:
                state.durable.abandon(str(exc))
            state.restore()
            exc.add_note(
                "The last committed state was restored. This job was not started to survive lost ranks: launch it with "
                "`unidist launch --min-np N`."
            )
            raise
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        state.on_reset()
        if not skip_sync:
            state.sync()
