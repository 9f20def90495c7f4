"""State that can be committed, restored and synchronised, with Horovod's names; the framework-free part.

It works in any job: `sync` makes the ranks equal, `commit` keeps a state in memory and `restore` brings it back. In an
elastic job, `run` continues with it after ranks have failed or joined (`unidist.elastic.generations`).
"""

from __future__ import annotations

import copy
import functools
import os
import queue
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.reader import Convert
from unidist.checkpoint.framework_states import FrameworkStates
from unidist.checkpoint.job import CheckpointObjects
from unidist.checkpoint.plain_state import PlainState
from unidist.elastic.durable.checkpoints import Durable
from unidist.elastic.durable.commit_agreement import agree_at_commit
from unidist.elastic.durable.parts import DurableParts
from unidist.elastic.notifications import HostUpdateResult, notification_manager
from unidist.elastic.peer.memory import PeerMemory, peers_of
from unidist.errors import HorovodInternalError, PeerLostError, UsageError
from unidist.launcher import AUTO, DurableOptions, interval_of
from unidist.negotiation import objects
from unidist.negotiation.objects import gather_objects
from unidist.runtime import context

Result = TypeVar("Result")


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; raised by `commit` and `check_host_updates`, understood by `run`.

    Args:
        skip_sync: ranks only leave, so the state of the others is equal already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class State:
    """The state from which training can continue: kept in memory by `commit`, made equal on all ranks by `sync`.

    A class derived from it defines `save`, `restore` and `sync`. The names that begin with an underscore and are set
    here are those that scripts of Horovod use.

    Args:
        bcast_object: returns the object of rank 0 on every rank; default: by unidist's own exchange.
        get_rank: returns the rank of this process; default: unidist's.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = _broadcast_object if bcast_object is None else bcast_object
        self._rank = _present_rank if get_rank is None else get_rank
        self._host_messages: queue.Queue[tuple[float, HostUpdateResult]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._has_agreed = False

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call these after the number of ranks has changed, for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to a new set of ranks, before the state is synchronised; `run` calls it."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Take note of a change of the hosts, for the next `check_host_updates`.

        A thread of the runtime calls it, in an elastic job. One that is overridden and does not call this one keeps the
        world from changing: this rank does not ask for it.

        Args:
            timestamp: seconds since the epoch; one that is not later than that of the latest change does not count.
            update_res: whether ranks are added, removed or both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keep the present state, so that it can be restored, and check for changes of the hosts.

        Raises:
            HostsUpdatedInterrupt: hosts join or leave.
        """
        self.save()
        self.num_commits += 1
        self.check_host_updates_at_commit()

    def check_host_updates_at_commit(self) -> None:
        """Check for changes of the hosts, and make a durable checkpoint of the commit if one is due."""
        self._has_agreed = False
        if self.durable is None:
            self.check_host_updates()
        else:
            self.durable.step()
            self.check_host_updates()
            self.durable.save_if_agreed(self)
        if not self._has_agreed:  # overridden by one that exchanges itself, or not in every step
            membership = context.current().membership
            if membership is not None and membership.assignment is not None:
                membership.link.step()

    keeps_shares = False
    """Some value is divided over the ranks, or differs: after every change of the world the state is synchronised."""

    num_commits = -1
    """Commits that this state includes, made on any rank: the largest is the latest. Below 0: never synchronised."""

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on every rank, if any rank was told that hosts join or leave.

        Collective: every rank calls it, or `commit`, equally often.
        """
        runtime, durable = context.current(), self.durable
        is_told, update = self._take_messages()
        agreed = agree_at_commit(
            runtime,
            checkpoint=durable is not None and durable.is_wanted,
            change=is_told,
            added=HostUpdateResult.added in update,
            removed=HostUpdateResult.removed in update,
        )
        self._has_agreed = True
        if runtime.membership is not None and runtime.membership.assignment is not None:
            from unidist.elastic.generations import record_step

            record_step(runtime, runtime.membership)
        if durable is not None:
            durable.agreed(self, agreed)
        if agreed.change:
            raise HostsUpdatedInterrupt(skip_sync=agreed.removed and not agreed.added)

    def _take_messages(self) -> tuple[bool, HostUpdateResult]:
        """Return whether there was news of the hosts since the last call, and what."""
        is_told, update = False, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, found = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp, is_told = timestamp, True
                update |= found
        return is_told, update

    # Durable checkpoints, see `unidist.elastic.durable.checkpoints`

    durable: Durable | None = None
    """Makes durable checkpoints; None: there are none."""

    def checkpoint_to(
        self, folder: str | os.PathLike[str], *, interval: float | Literal["auto"] = AUTO, keep: int = 2
    ) -> None:
        """Make durable checkpoints of this state, and start from the latest one, in the function that `run` wraps.

        Every rank calls it with the same arguments, before that function; it takes precedence over
        `--checkpoint-dir`.

        Args:
            folder: for these checkpoints alone, in a file system that all ranks share.
            interval: seconds from one to the next; "auto": as often as they take less than 3.5 % of the time.
            keep: number of complete checkpoints to keep.

        Raises:
            ConfigurationError: a value is out of range.
        """
        self.durable = Durable(DurableOptions(Path(os.path.abspath(folder)), interval_of(interval), keep))

    def durable_parts(self) -> DurableParts:
        """Return the contents of a durable checkpoint of this state.

        Raises:
            UsageError: states of this kind cannot be saved.
        """
        raise UsageError(
            f"{type(self).__name__} cannot be put into checkpoints: use TorchState, KerasState or ObjectState, or "
            "leave --checkpoint-dir and checkpoint_to out"
        )

    def begin_generation(self, progress: int, *, needs_sync: bool) -> None:
        """Make the state equal on all ranks, by `sync` or from a checkpoint. Collective.

        `run` calls it before the function.

        Args:
            progress: commits that the state of rank 0 includes; 0: it is that of the script's beginning.
            needs_sync: not all ranks have that state.

        Raises:
            StateLostError: a share of the state was lost with its ranks, and no checkpoint exists.
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

    def make_equal(self) -> None:
        """Make what differs between ranks equal, and keep that, before a checkpoint. Collective; by default nothing."""

    def finish(self) -> None:
        """Make a last checkpoint at the end of training, if the state is durable. Collective."""
        if self.durable is not None:
            self.durable.finish(self)

    def save(self) -> None:
        """Keep the present state in memory."""
        raise self._undefined("save")

    def restore(self) -> None:
        """Bring back the state that was kept."""
        raise self._undefined("restore")

    def sync(self) -> None:
        """Give every rank the state of rank 0. Collective."""
        raise self._undefined("sync")

    def reset(self) -> None:
        """Adapt to a new set of ranks; by default there is nothing to adapt."""

    def _undefined(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} is an elastic state without {name}(); define it")


def _broadcast_object(value: Any) -> Any:
    return objects.broadcast_object(context.current().negotiator, value, root=0, name="elastic.state")


def _present_rank() -> int:
    return context.current().topology.rank


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
        """Keep a copy of the present value in memory, as attributes of the handler.

        Do not write into the copy of the save before: with values that are divided over the ranks, a commit may fail
        after this, and then `ObjectState` gives the handler the attributes back that it had.
        """

    @abstractmethod
    def restore(self) -> None:
        """Bring back the value that was kept."""

    is_checkpointed = True
    """The value belongs into durable checkpoints; else it is for going on in the same process."""

    differs = False
    """The value differs between ranks in a way that matters: after every change of the world it is synchronised."""

    def make_equal(self) -> None:  # noqa: B027 - nothing to do is a valid answer
        """Make the value equal on all ranks if it `differs`, before these change, or a checkpoint. Collective."""

    def given(self) -> Any:
        """Return what rank 0 needs to have this rank's value, picklable; None: it needs nothing, see `take`."""
        return None

    def take(self, given: Any) -> None:  # noqa: B027 - nothing to take is a valid answer
        """Take what `given` returned on another rank: of a model that is divided, rank 0 may have just joined."""

    def set_value(self, value: Any) -> None:
        """Handle, and keep, another value from now on: the attribute of the state was set."""
        self.value = value
        self.save()

    @abstractmethod
    def sync(self) -> None:
        """Give every rank the value of rank 0. Collective.

        `ObjectState` calls `save` only after all values were synchronised, so that a commit never mixes two states.
        """


class SharedHandler(Handler):
    """Handler of a value that is divided over the ranks; `ObjectState` keeps all of them in one `PeerMemory`.

    Args:
        value: the value.
        states: returns the value's checkpoint states, by section; called each time they are needed.
        convert: `Framework.convert`.
        is_sharded: whether no other rank has what this one has of the value, or a function of the value that tells,
            called each time. Else it is a part of a divided model, which the ranks with the same part of other replicas
            have, too.
    """

    def __init__(
        self,
        value: Any,
        states: Callable[[Any], Mapping[str, KeepsState]],
        convert: Convert | None = None,
        *,
        is_sharded: bool | Callable[[Any], bool] = True,
    ) -> None:
        self._is_sharded = is_sharded
        self._states = states
        self.convert = convert
        super().__init__(value)

    @classmethod
    def of_model(cls, kept: FrameworkStates, model: Any, *, is_sharded: bool) -> Self:
        """Return the handler of a model of which the ranks have parts.

        Args:
            kept: the checkpoint states of the framework's objects.
            model: this rank's.
            is_sharded: see the class.
        """
        return cls(
            model,
            lambda value: CheckpointObjects(value, None).sections(kept),
            kept.framework.convert,
            is_sharded=is_sharded,
        )

    @classmethod
    def of_optimizer(
        cls,
        kept: FrameworkStates,
        optimizer: Any,
        model: Any = None,
        *,
        is_sharded: bool | Callable[[Any], bool] = True,
        has_model: Callable[[], bool] | None = None,
    ) -> Self:
        """Return the handler of an optimizer whose state is divided over the ranks. It has the optimizer's update, too.

        Args:
            kept: the checkpoint states of the framework's objects.
            optimizer: bound; or not yet, on a rank that is still alone.
            model: of its parameters; None: their order names them.
            is_sharded: see the class.
            has_model: whether it handles the model as well, asked each time; None: it does not.
        """

        def states(value: Any) -> dict[str, KeepsState]:
            kept.prepare_to_load(value)
            sections = CheckpointObjects(model, value).sections(kept)
            if has_model is None or not has_model():
                sections.pop("model", None)
            return sections

        return cls(optimizer, states, kept.framework.convert, is_sharded=is_sharded)

    @property
    def is_sharded(self) -> bool:
        """No other rank has what this one has of the value."""
        return self._is_sharded(self.value) if callable(self._is_sharded) else self._is_sharded

    def states(self, name: str) -> dict[str, KeepsState]:
        """Return the value's states, by section; section names begin with `name`."""
        return {f"{name}.{section}": state for section, state in self._states(self.value).items()}

    @override
    def save(self) -> None:
        """Do nothing: `ObjectState.save` keeps all shares."""

    @override
    def restore(self) -> None:
        """Do nothing: `ObjectState.restore` restores all shares."""

    @override
    def sync(self) -> None:
        """Do nothing: `ObjectState.sync` loads all shares."""


@dataclass(frozen=True)
class _Kept:
    """State of an `ObjectState` at a commit, apart from its shards.

    Args:
        handlers: attributes of each handler.
        values: the plain values.
    """

    handlers: dict[str, dict[str, Any]]
    values: dict[str, Any]


class ObjectState(State):
    """State of plain objects, each an attribute: `ObjectState(epoch=0, batch=0)`.

    Args:
        bcast_object: see `State`; it is given the values of this state, by attribute.
        get_rank: see `State`.
        handlers: for values that have one, by attribute.
        values: the other values, by attribute. They must be picklable (cloudpickle).
    """

    if TYPE_CHECKING:  # the script decides which attributes there are

        def __getattr__(self, name: str) -> Any: ...

    has_values = True
    """This rank had the values that are not divided when the present generation began, and did not get them."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        *,
        handlers: Mapping[str, Handler] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._handlers = dict(handlers or {})
        self._saved_state = values
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        self._restore_values()
        shared = [handler for handler in self._handlers.values() if isinstance(handler, SharedHandler)]
        self._shares = PeerMemory(shared[0].convert) if shared else None
        self._kept_in: weakref.ref[context.Context] | None = None
        self._unmarked: _Kept | None = None
        self._keep_shares()

    @property
    @override
    def keeps_shares(self) -> bool:  # type: ignore[override]  # which is a constant where there are no handlers
        return self._shares is not None or self._differs

    @property
    def _differs(self) -> bool:
        return any(handler.differs for handler in self._handlers.values())

    @override
    def make_equal(self) -> None:
        if self._differs:
            for handler in self._handlers.values():
                handler.make_equal()
            self.save()

    @override
    def commit(self) -> None:
        """Keep the present state and check for changes of the hosts. Collective if a value is divided over ranks."""
        self.save()
        self.num_commits += 1
        if self._shares is not None:
            self._shares.drop_older()
        self.check_host_updates_at_commit()

    @override
    def check_host_updates(self) -> None:
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self.make_equal()  # and nothing of ranks that leave is lost
            if self._shares is not None:
                self.save()  # the shares of ranks that leave must be on other ranks
            raise

    @override
    def save(self) -> None:
        """Keep deep copies of the values, so that later changes do not affect them.

        If shares are kept and a rank is lost meanwhile, the values are those that were kept before. But another rank
        may have marked this commit already, so what was to be kept is kept, too, until that is known.
        """
        before = self._kept()
        for handler in self._handlers.values():
            handler.save()
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}
        try:
            self._keep_shares()
        except BaseException:
            self._unmarked = self._kept()
            self._put_back(before)
            raise
        self._unmarked = None

    def _kept(self) -> _Kept:
        """Return what is kept of the values that are not divided."""
        return _Kept({name: dict(vars(handler)) for name, handler in self._handlers.items()}, self._saved_state)

    def _put_back(self, kept: _Kept) -> None:
        for name, attributes in kept.handlers.items():
            vars(self._handlers[name]).update(attributes)
        self._saved_state = kept.values

    @override
    def restore(self) -> None:
        """Bring back the values that were kept. If the world has changed, `sync` fetches the shares instead."""
        if self._shares is not None and self._is_divided_for(context.current()):
            self._shares.restore(self._states())
        for handler in self._handlers.values():
            handler.restore()
        self._restore_values()

    @override
    def sync(self) -> None:
        """Give every rank the state of rank 0, and commit it. Collective."""
        runtime = context.current()
        if self._shares is not None and not self._is_divided_for(runtime):
            marked = self._shares.committed
            found = self._shares.load(peers_of(runtime), self._states())
            self._give_values(runtime, has_values=found is not None and (found == marked or self._take_unmarked()))
        for handler in self._handlers.values():
            handler.sync()
        present = {name: getattr(self, name) for name in self._saved_state}
        received = self._bcast_object(present)
        self._keep_shares()
        for handler in self._handlers.values():
            handler.save()
        self._saved_state = received
        self._restore_values()

    def _take_unmarked(self) -> bool:
        """Bring back the values of a commit that another rank has marked, and this one has not; whether it has them."""
        kept, self._unmarked = self._unmarked, None
        if kept is None:
            return False
        self._put_back(kept)
        for handler in self._handlers.values():
            handler.restore()
        self._restore_values()
        return True

    def _give_values(self, runtime: context.Context, *, has_values: bool) -> None:
        """Have rank 0 take the values of the first rank that has those of the commit that was loaded. Collective.

        Rank 0 has the most commits, but in a job whose model is divided, where it may have just joined.

        Args:
            runtime: of the present generation.
            has_values: this rank has them.
        """
        self.has_values = has_values
        communicator = peers_of(runtime).communicator
        having: list[bool] = gather_objects(communicator, has_values)
        first = having.index(True)
        if first == 0:
            return
        given = None
        if communicator.rank == first:
            given = (
                {name: handler.given() for name, handler in self._handlers.items()},
                {name: getattr(self, name) for name in self._saved_state},
            )
        handlers, values = gather_objects(communicator, given)[first]
        if communicator.rank == 0:
            for name, found in handlers.items():
                if found is not None:
                    self._handlers[name].take(found)
            for name, value in values.items():
                object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a value; if it has a handler, the handler keeps the new value."""
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        object.__setattr__(self, name, value)

    def _keep_shares(self) -> None:
        if self._shares is not None:
            runtime = context.current()
            is_sharded = any(
                handler.is_sharded for handler in self._handlers.values() if isinstance(handler, SharedHandler)
            )
            self._shares.commit(peers_of(runtime), self._states(), is_sharded=is_sharded)
            self._kept_in = weakref.ref(runtime)

    def _is_divided_for(self, runtime: context.Context) -> bool:
        """Return whether the shares kept last are those of the present ranks."""
        return self._kept_in is not None and self._kept_in() is runtime

    @override
    def durable_parts(self) -> DurableParts:
        """Return the plain values; states of models and optimizers are up to the frameworks' own classes."""
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
            "extra": PlainState(
                lambda: {name: getattr(self, name) for name in self._saved_state}, put, is_writer=is_writer
            )
        }

    def _states(self) -> dict[str, KeepsState]:
        found: dict[str, KeepsState] = {}
        for name, handler in self._handlers.items():
            if isinstance(handler, SharedHandler):
                found |= handler.states(name)
        return found

    def _restore_values(self) -> None:
        for name, value in self._saved_state.items():
            object.__setattr__(self, name, copy.deepcopy(value))


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a training function `func(state, ...)`: its state is synchronised before it starts.

    In a job that was launched as elastic (`unidist launch --min-np`), the loss of a rank, or a change of the hosts,
    ends the function; the other ranks restore the last commit, form a new world, run `on_reset`, synchronise the
    state, and call the function again. In any other job the committed state is restored and the error raised. A script
    that raises HorovodInternalError itself counts as one that lost a rank.
    """
    return run_fn(func, None)


def run_fn(func: Callable[..., Result], reset: Callable[[], object] | None) -> Callable[..., Result]:
    """Wrap a training function as `run` does, with a function that starts the runtime again; Horovod's `run_fn`.

    Args:
        func: the training function, `func(state, ...)`.
        reset: called once for each new world, after the last one was shut down; it calls `init()`. In a job whose ranks
            do not change it is called after HorovodInternalError, too, and the function runs again. None: see `run`.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        membership = context.current().membership
        if membership is None:
            notification_manager.register_listener(state)
            try:
                return _run_once(training, reset, state, *args, **kwargs)
            finally:
                notification_manager.remove_listener(state)
        from unidist.elastic.generations import run_through_generations

        return run_through_generations(membership, training, reset, state, *args, **kwargs)

    def training(state: State, *args: Any, **kwargs: Any) -> Result:
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError as exc:
            if type(exc) is not HorovodInternalError:
                raise
            raise PeerLostError(str(exc)) from exc  # the script's own: it gives up this world

    return wrapper


def _run_once(
    func: Callable[..., Result], reset: Callable[[], object] | None, state: State, *args: Any, **kwargs: Any
) -> Result:
    """Run in a job whose ranks do not change; an interrupt that the script raises is handled as well."""
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
            skip_sync = False
            if reset is None:
                exc.add_note(_NOT_ELASTIC)
                raise
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        if reset is not None:
            reset()
        state.on_reset()
        if not skip_sync:
            state.sync()


_NOT_ELASTIC = (
    "The last committed state was restored. This job was not started to survive lost ranks: launch it with "
    "`unidist launch --min-np N`."
)
