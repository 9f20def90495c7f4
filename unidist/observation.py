"""Records of the calls in which threads of this process may wait for other ranks, and of how many this rank has made.

A communicator, or the named operations over one, that is given `GroupCalls` keeps record in it. `observe_methods` sees
to that where a class is defined, for every engine; without them, a call costs a test for None. Nothing here waits or
looks at a clock: who observes looks at `stacks` now and then.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from unidist.buffer import Buffer
from unidist.errors import MismatchError, PeerLostError, UnidistError, UsageError

if TYPE_CHECKING:
    from unidist.communicator import Communicator

__all__ = [
    "Call", "GroupCalls", "GroupCounts", "Method", "Observer", "Stack", "Waitable", "joining", "observe",
    "observe_methods", "operating", "running", "stacks", "submitting",
]  # fmt: skip

CallKind = Literal["collective", "send", "recv", "named", "join"]
Method = Callable[..., Any]
_MAX_ENDED = 1024
"""Handles that nobody has waited for are kept up to this number; then those of ended operations go."""


class Observer(Protocol):
    """Watches the groups of a runtime."""

    def add(self, group: GroupCalls, communicator: Communicator) -> None:
        """Keep record of one more group, and remember its communicator without keeping it alive."""

    def instead_of(self, error: PeerLostError, call: Call) -> BaseException:
        """Return the error to raise where a call ended with `error`: of a deadlock, if there is one."""


@dataclass(frozen=True)
class GroupCounts:
    """How many calls on a group a rank has entered; messages by group rank of the other."""

    collectives: int
    sent: dict[int, int]
    received: dict[int, int]


class GroupCalls:
    """The calls of this rank on one group of ranks: how many of each kind it has entered.

    Args:
        name: the same on all ranks of the group, and of no other group.
        members: world ranks, by group rank.
        description: for messages.
        observer: is asked for the error where a call has lost a peer; None: nobody is.

    Attributes:
        collectives: how many this rank has entered.
        sent: messages sent, by group rank of the receiver.
        received: messages asked for, by group rank of the sender.
        handles: of a group with named operations, those that were not waited for; else None. They keep tensors.
        joined: this rank is in `join`.
        thread: the one that entered the last collective or message; 0: none yet.
        splits: how often the group was divided.
    """

    def __init__(self, name: str, members: tuple[int, ...], description: str, observer: Observer | None = None) -> None:
        self.name = name
        self.members = members
        self.description = description
        self.observer = observer
        self.collectives = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.handles: dict[str, Any] | None = None
        self.joined = False
        self.thread = 0
        self.splits = 0

    def counts(self) -> GroupCounts:
        """Return what `restore` needs of a rank that has left."""
        return GroupCounts(self.collectives, dict(self.sent), dict(self.received))

    def restore(self, counts: GroupCounts) -> None:
        """Take over the counts of another rank, as `counts` returned them there."""
        self.collectives, self.sent, self.received = counts.collectives, counts.sent, counts.received

    def entered(self, kind: str, number: int, name: str, peer: int) -> bool:
        """Return whether this rank has entered the counterpart of a call that another rank is blocked in.

        Args:
            kind: of the other rank's call.
            number: of that call among its kind (to one peer), from 1.
            name: of a named operation.
            peer: the other rank, by its group rank.
        """
        if kind == "collective":
            return self.collectives >= number
        if kind == "recv":
            return self.sent.get(peer, 0) >= number
        if kind == "send":
            return self.received.get(peer, 0) >= number
        return self.joined or (kind == "named" and self._is_pending(name))

    def _is_pending(self, name: str) -> bool:
        """Return whether this rank has submitted an operation of this name that is not done."""
        handle = (self.handles or {}).get(name)
        if handle is None or not handle.done():
            return handle is not None
        try:
            handle.rows  # noqa: B018 - raises what `wait` will
        except PeerLostError:
            return True  # that is why the others' wait will end, too, not for the lack of this rank
        except UnidistError:
            return False
        return False


@dataclass(slots=True, eq=False)
class Call:
    """One blocking call on a group. Compared by identity.

    Args:
        group: on which.
        kind: decides what it waits for.
        operation: in words ("allreduce", "send").
        number: among its kind, from 1; 0 for named operations.
        name: of a named operation.
        peer: the other rank of a message, by its group rank; -1: the whole group.
        data: that a message or a named operation moves.
    """

    group: GroupCalls
    kind: CallKind
    operation: str
    number: int = 0
    name: str = ""
    peer: int = -1
    data: Buffer | None = None

    def explain(self, error: PeerLostError) -> None:
        """Raise the error that says why the call has ended with `error`, if it is another one."""
        found = error if self.group.observer is None else self.group.observer.instead_of(error, self)
        if found is not error:
            raise found from None

    def take_back(self) -> None:
        """Uncount the call, which was refused before anything was issued."""
        if self.kind == "collective":
            self.group.collectives -= 1
        else:
            (self.group.sent if self.kind == "send" else self.group.received)[self.peer] -= 1


Stack = list["Call | str"]

stacks: defaultdict[int, Stack] = defaultdict(list)
"""By thread identifier: labels and calls, the outermost first. Those of another thread are looked at with `get`."""

os.register_at_fork(after_in_child=stacks.clear)  # a forked child is no rank


class Waitable(ABC):
    """An operation under way. The `wait` of a subclass puts the operation's call on the stack meanwhile.

    Attributes:
        observed_call: that began it, if somebody observes it.
        can_block: False: `wait` returns at once.
    """

    observed_call: Call | None = None
    can_block: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let `wait` keep record."""
        super().__init_subclass__(**kwargs)
        observe_methods(cls, {"wait": _waiting})

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the operation is complete."""


def observe(communicator: Communicator, name: str, observer: Observer) -> Communicator:
    """Make a communicator and all that are split from it keep record; return it.

    Args:
        communicator: of any engine; unchanged if it has a single rank.
        name: of its group, the same on all its ranks.
        observer: of this runtime.
    """
    if communicator.size > 1 and communicator.observed is None:
        communicator.observed = GroupCalls(name, communicator.members, communicator.description, observer)
        observer.add(communicator.observed, communicator)
    return communicator


def observe_methods(cls: type, wrappers: Mapping[str, Callable[[Method], Method]]) -> None:
    """Replace the named methods of a class by ones that keep record, except for those that do already.

    A method that calls that of its base class counts twice, on every rank.
    """
    for name, wrapper in wrappers.items():
        plain = getattr(cls, name, None)
        if plain is not None and not (hasattr(plain, "keeps_record") or hasattr(plain, "__isabstractmethod__")):
            method: Any = functools.wraps(plain)(wrapper(plain))
            method.keeps_record = True
            setattr(cls, name, method)


def operating(plain: Method) -> Method:
    """Wrap a collective or message of a communicator."""
    operation = plain.__name__
    role = {"send": "to", "recv": "source"}.get(operation, "")

    def method(self: Communicator, *args: Any, **kwargs: Any) -> Any:
        group = self.observed
        if group is None:
            return plain(self, *args, **kwargs)
        if role:
            call = _message(group, operation, kwargs[role], *args)
        else:
            group.collectives += 1
            call = Call(group, "collective", operation, group.collectives)
        group.thread = get_ident()
        calls = stacks[group.thread]
        calls.append(call)
        try:
            result = plain(self, *args, **kwargs)
        except PeerLostError as error:
            call.explain(error)
            raise
        except UsageError as error:
            if not isinstance(error, MismatchError):
                call.take_back()
            raise
        finally:
            calls.pop()
        if getattr(result, "can_block", False):
            result.observed_call = call
        return result

    return method


def _message(group: GroupCalls, operation: str, peer: int, buffer: Buffer) -> Call:
    is_send = operation == "send"
    counts = group.sent if is_send else group.received
    counts[peer] = number = counts.get(peer, 0) + 1
    return Call(group, "send" if is_send else "recv", operation, number, peer=peer, data=buffer)


def _waiting(plain: Method) -> Method:
    """Wrap the `wait` of an operation under way."""

    def wait(self: Waitable, timeout: timedelta | None = None) -> Any:
        call = self.observed_call
        if call is None:
            return plain(self, timeout)
        calls = stacks[get_ident()]
        calls.append(call)
        try:
            result = plain(self, timeout)
        except PeerLostError as error:
            call.explain(error)
            raise
        finally:
            calls.pop()
        handles = call.group.handles or {}
        if handles.get(call.name) is self and handles[call.name].done():
            del handles[call.name]
        return result

    return wait


def submitting(plain: Method) -> Method:
    """Wrap `submit` of named operations."""

    def submit(self: Any, request: Any, **options: Any) -> Any:
        handle = plain(self, request, **options)
        group = self.observed
        if group is not None:
            if len(group.handles) > _MAX_ENDED:
                group.handles = {name: each for name, each in list(group.handles.items()) if not each.done()}
            group.handles[request.name] = handle
            handle.observed_call = Call(group, "named", request.kind, name=request.name, data=request.target)
        return handle

    return submit


class running:  # noqa: N801 - reads as a statement
    """Keep record, within the block, of a named operation that is submitted and waited for in one call.

    The call may be complete before that: to keep record takes longer than a small operation.

    Args:
        group: of the named operations; None: nobody looks.
        handle: of the operation.
        request: what it does.
    """

    __slots__ = ("_group", "_handle", "_request")

    def __init__(self, group: GroupCalls | None, handle: Any, request: Any) -> None:
        self._group = group
        self._handle = handle
        self._request = request

    def __enter__(self) -> None:
        if self._group is not None:
            assert self._group.handles is not None, "a group of named operations"
            self._group.handles[self._request.name] = self._handle
            stacks[get_ident()].append(self._call(self._group))

    def __exit__(self, *error: object) -> None:
        if self._group is not None:
            stacks[get_ident()].pop()

    def concluded(self, error: BaseException | None) -> None:
        """Take note of how the operation has ended, after the block, or without it.

        Raises:
            UnidistError: what `Observer.instead_of` has found instead of `error`.
        """
        group = self._group
        if group is None:
            return
        if isinstance(error, PeerLostError):
            self._call(group).explain(error)
        elif error is None and group.handles:
            group.handles.pop(self._request.name, None)

    def _call(self, group: GroupCalls) -> Call:
        return Call(group, "named", self._request.kind, name=self._request.name, data=self._request.target)


def joining(plain: Method) -> Method:
    """Wrap `join` of named operations."""

    def join(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.observed
        if group is None:
            return plain(self, *args, **kwargs)
        group.joined = True
        call = Call(group, "join", "join")
        calls = stacks[get_ident()]
        calls.append(call)
        try:
            return plain(self, *args, **kwargs)
        except PeerLostError as error:
            call.explain(error)
            raise
        finally:
            calls.pop()
            group.joined = False

    return join
