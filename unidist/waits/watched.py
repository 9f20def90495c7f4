"""Communicators and named operations that record which operations this rank has entered and is blocked in.

A communicator gets a subclass of its own class, so it keeps the capabilities that only its engine knows. Each call
counts, whether it blocks at once or in `Work.wait`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.communicator import COMPLETED, Communicator, Work, format_ranks
from unidist.communicator_capabilities import SharesMemory
from unidist.errors import MismatchError, PeerLostError, UnidistError, UsageError
from unidist.negotiation import NamedHandle, NamedOperations, Request
from unidist.waits.calls import Call, Group, stack

__all__ = ["Verdicts", "watch", "watch_names"]

_COLLECTIVES = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier")
_MAX_ENDED = 1024
"""Handles of ended operations that are kept before they are looked through."""


class Verdicts(Protocol):
    """Questions to the owner of the watched objects."""

    def add(self, group: Group, communicator: Communicator) -> None:
        """Keep record of one more group, and remember its communicator without keeping it alive."""

    def instead_of(self, error: PeerLostError, call: Call) -> BaseException:
        """Return the error to raise where a call ended with `error`: of a deadlock, if there is one."""


def watch(communicator: Communicator, name: str, verdicts: Verdicts) -> Communicator:
    """Make a communicator and all that are split from it keep record; return it.

    Args:
        communicator: of any engine; unchanged if it has a single rank.
        name: of its group, the same on all its ranks.
        verdicts: of this runtime.
    """
    if communicator.size > 1 and group_of(communicator) is None:
        group = Group(name, communicator.members, communicator.description)
        plain = type(communicator)
        communicator.__class__ = _watched_class(plain)
        communicator._unidist_watch = (group, verdicts)  # type: ignore[attr-defined]
        verdicts.add(group, communicator)
    return communicator


def group_of(communicator: Communicator) -> Group | None:
    """Return the record of a watched communicator."""
    found: tuple[Group, Verdicts] | None = getattr(communicator, "_unidist_watch", None)
    return None if found is None else found[0]


@functools.cache
def _watched_class(plain: type[Communicator]) -> type[Communicator]:
    methods: dict[str, Any] = {name: _collective(getattr(plain, name)) for name in _COLLECTIVES}
    methods["_unidist_watch"] = None  # of an object that an engine makes as one of its own class, until it is watched
    methods["send"] = _message(plain.send, "to")
    methods["recv"] = _message(plain.recv, "source")
    methods["split"] = _split(plain.split)
    if issubclass(plain, SharesMemory):
        methods["allocate_shared"] = _collective(plain.allocate_shared)
    names = {name: getattr(plain, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(plain.__name__, (plain,), {**names, **methods})


def _collective(plain: Callable[..., Any]) -> Callable[..., Any]:
    operation = plain.__name__

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._unidist_watch is None:
            return plain(self, *args, **kwargs)
        group, verdicts = self._unidist_watch
        group.collectives += 1
        call = Call(group, "collective", operation, group.collectives, nbytes=_largest(args))
        return _issue(self, call, plain, args, kwargs, verdicts, group)

    return method


def _message(plain: Callable[..., Any], role: str) -> Callable[..., Any]:
    is_send = role == "to"

    @functools.wraps(plain)
    def method(self: Any, buffer: Buffer, **kwargs: Any) -> Any:
        if self._unidist_watch is None:
            return plain(self, buffer, **kwargs)
        group, verdicts = self._unidist_watch
        peer = kwargs[role]
        counts = group.sent if is_send else group.received
        counts[peer] = number = counts.get(peer, 0) + 1
        call = Call(group, "send" if is_send else "recv", plain.__name__, number, peer=peer, nbytes=buffer.nbytes)
        return _issue(self, call, plain, (buffer,), kwargs, verdicts, group)

    return method


def _split(plain: Callable[..., Any]) -> Callable[..., Any]:
    collective = _collective(plain)

    @functools.wraps(plain)
    def method(self: Any, ranks: Any) -> Any:
        made = collective(self, ranks)
        if self._unidist_watch is None:
            return made
        group, verdicts = self._unidist_watch
        group.splits += 1
        if made is None:
            return None
        return watch(made, f"{group.name}.{group.splits}[{format_ranks(made.members)}]", verdicts)

    return method


def _issue(
    communicator: Any,
    call: Call,
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    verdicts: Verdicts,
    group: Group,
) -> Any:
    group.thread = threading.get_ident()
    calls = stack()
    calls.append(call)
    try:
        result = plain(communicator, *args, **kwargs)
    except PeerLostError as error:
        _raise(error, verdicts, call)
        raise
    except UsageError as error:
        if not isinstance(error, MismatchError):
            _take_back(call)
        raise
    finally:
        calls.pop()
    if result is COMPLETED or not isinstance(result, Work):
        return result
    return _WatchedWork(result, call, verdicts)


def _raise(error: PeerLostError, verdicts: Verdicts, call: Call) -> None:
    """Raise the error that says why a call ended with `error`, if it is another one."""
    found = verdicts.instead_of(error, call)
    if found is not error:
        raise found from None


def _take_back(call: Call) -> None:
    """Uncount a call that was refused before anything was issued."""
    group = call.group
    if call.kind == "collective":
        group.collectives -= 1
    else:
        (group.sent if call.kind == "send" else group.received)[call.peer] -= 1


def _largest(args: tuple[Any, ...]) -> int:
    """Return the size in bytes of the largest buffer among the arguments."""
    return max((each.nbytes for each in args if isinstance(each, Buffer)), default=0)


class _WatchedWork(Work):
    __slots__ = ("_call", "_verdicts", "_work")

    def __init__(self, work: Work, call: Call, verdicts: Verdicts) -> None:
        self._work = work
        self._call = call
        self._verdicts = verdicts

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        calls = stack()
        calls.append(self._call)
        try:
            self._work.wait(timeout)
        except PeerLostError as error:
            _raise(error, self._verdicts, self._call)
            raise
        finally:
            calls.pop()

    @override
    def done(self) -> bool:
        return self._work.done()

    @override
    def poll(self, limit: timedelta) -> bool:
        return self._work.poll(limit)


def watch_names(names: NamedOperations, communicator: Communicator, verdicts: Verdicts) -> NamedOperations:
    """Return named operations that keep record; `names` unless there is more than one rank.

    Args:
        names: over the ranks of `communicator`.
        communicator: watched; its group is that of the names.
        verdicts: of this runtime.
    """
    group = group_of(communicator)
    return names if group is None else _WatchedNames(names, group, verdicts)


class _WatchedNames(NamedOperations):
    def __init__(self, names: NamedOperations, group: Group, verdicts: Verdicts) -> None:
        self.rank, self.size = names.rank, names.size
        self._names = names
        self._group = group
        self._verdicts = verdicts
        self._handles: dict[str, NamedHandle] = {}
        group.is_pending = self._is_pending

    @override
    def submit(self, request: Request, *, background: bool = False) -> NamedHandle:
        handle = self._names.submit(request, background=background)
        if len(self._handles) > _MAX_ENDED:
            self._handles = {name: each for name, each in list(self._handles.items()) if not each.done()}
        self._handles[request.name] = handle
        target = request.target
        call = Call(self._group, "named", str(request.kind), name=request.name, nbytes=target.nbytes if target else 0)
        return _WatchedHandle(handle, call, self._verdicts)

    @override
    def join(self, serve: Callable[[str], None]) -> int:
        self._group.joined = True
        calls = stack()
        call = Call(self._group, "join", "join")
        calls.append(call)
        try:
            return self._names.join(serve)
        except PeerLostError as error:
            _raise(error, self._verdicts, call)
            raise
        finally:
            calls.pop()
            self._group.joined = False

    @override
    def moves(self, memory: str) -> bool:
        return self._names.moves(memory)

    @property
    @override
    def num_pauses(self) -> int:
        return self._names.num_pauses

    @property
    @override
    def cycle_time(self) -> timedelta | None:
        return self._names.cycle_time

    @override
    def set_cycle_time(self, cycle_time: timedelta) -> None:
        self._names.set_cycle_time(cycle_time)

    @override
    def close(self) -> None:
        self._names.close()

    def _is_pending(self, name: str) -> bool:
        handle = self._handles.get(name)
        if handle is None or not handle.done():
            return handle is not None
        try:
            handle.rows  # noqa: B018 - raises what `wait` will
        except PeerLostError:
            return True  # that is why the others' wait will end, too, not for the lack of this rank
        except UnidistError:
            return False
        return False


class _WatchedHandle(NamedHandle):
    __slots__ = ("_call", "_handle", "_verdicts")

    def __init__(self, handle: NamedHandle, call: Call, verdicts: Verdicts) -> None:
        self._handle = handle
        self._call = call
        self._verdicts = verdicts

    @override
    def done(self) -> bool:
        return self._handle.done()

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        calls = stack()
        calls.append(self._call)
        try:
            self._handle.wait(timeout)
        except PeerLostError as error:
            _raise(error, self._verdicts, self._call)
            raise
        finally:
            calls.pop()

    @property
    @override
    def result(self) -> Buffer:
        return self._handle.result

    @property
    @override
    def rows(self) -> tuple[int, ...]:
        return self._handle.rows
