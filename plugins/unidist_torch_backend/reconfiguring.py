"""How processes find each other for a new group without a common store: each serves one, and passes its address on.

The address is the process's handle. The program or agent that chooses the members gathers their handles and gives the
same list to all of them; they meet in the store of the first. This is the protocol of PyTorch's `_reconfigure`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from unidist.errors import ConfigurationError, PeerLostError, UsageError
from unidist_torch_backend.meeting import own_address

_KIND = "unidist"


class Membership(Protocol):
    """The options of PyTorch's `_reconfigure`, as it passes them: `ReconfigureOptions` is one of these."""

    @property
    def uuid(self) -> int:
        """Of the new group: a number that it has not had before."""

    @property
    def handles(self) -> Sequence[str] | Set[str]:
        """Of all members. In a sequence they are in rank order; in a set the group chooses the order."""

    @property
    def timeout(self) -> timedelta | None:
        """Longest wait for the other members; None: that of the group."""


@dataclass(frozen=True)
class ReconfigureOptions:
    """The members that a process group shall have.

    PyTorch has a class of this name from version 2.14 on; either may be passed.

    Args:
        uuid: of the new group, the same on every member; a number that this process has not used before.
        handles: of all members, the same on each: `get_reconfigure_handle()` of theirs. In a sequence they are in rank
            order; for a set the group chooses the order.
        timeout: longest wait for the other members; default: that of the group.
        hints: ignored; PyTorch has them.
    """

    uuid: int
    handles: Sequence[str] | Set[str]
    timeout: timedelta | None = None
    hints: Mapping[str, str] = field(default_factory=dict)


class MeetingStore(NamedTuple):
    """Where the members of a new group meet.

    Attributes:
        store: of the new group alone.
        rank: of this process in it.
        size: of it.
    """

    store: Store
    rank: int
    size: int


class OwnStore:
    """The store that this process serves, for groups in which it is rank 0.

    It listens on all interfaces, as PyTorch's stores do; who reaches it could join.
    """

    def __init__(self) -> None:
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._used: set[int] = set()
        self._others: dict[
            str, TCPStore
        ] = {}  # by handle; a connection takes PyTorch seconds where a name server is slow
        address = own_address()
        host = f"[{address}]" if ":" in address else address
        self.handle = f"{_KIND}:{secrets.token_hex(8)}:{host}:{self._store.port}"
        """By which the other processes find this one."""

    def meet(self, options: Membership, timeout: timedelta) -> MeetingStore:
        """Return where the members meet. Called on each of them, after `check`.

        Args:
            options: who they are.
            timeout: longest wait for the first of them.

        Raises:
            ConfigurationError: another member was given other handles.
            PeerLostError: the first member cannot be reached.
        """
        handles = _in_order(options)
        self._used.add(options.uuid)
        self._others = {handle: store for handle, store in self._others.items() if handle in handles}
        rank = handles.index(self.handle)
        try:
            store = PrefixStore(f"reconfigure/{options.uuid}", self._store_of(handles[0], timeout))
            first = store.compare_set("handles", "", " ".join(handles)).decode()
        except RuntimeError as exc:
            self._others.pop(handles[0], None)
            host, port = _address(handles[0])
            raise PeerLostError(
                f"backend unidist: rank {rank} of {len(handles)} could not reach rank 0 at {host}:{port} within "
                f"{timeout.total_seconds():g} s. Has it ended? Reconfigure without it. ({exc})",
                ranks=(0,),
            ) from exc
        if first != " ".join(handles):
            raise ConfigurationError(
                f"backend unidist, rank {rank}: reconfigure with uuid={options.uuid} was given {len(handles)} handles, "
                f"and another member {len(first.split())} or different ones. Pass the same on every member."
            )
        return MeetingStore(store, rank, len(handles))

    def check(self, options: Membership) -> None:
        """Raise UsageError if this process is not among the members, or one is twice, or the uuid was used before."""
        handles = _in_order(options)
        if options.uuid in self._used:
            raise UsageError(
                f"backend unidist: reconfigure with uuid={options.uuid}, which is already used. Pass a new number, the "
                "same on every member."
            )
        if self.handle not in handles:
            raise UsageError(
                f"backend unidist: reconfigure was given {len(handles)} handle(s), and that of this process is not "
                "among them. Gather get_reconfigure_handle() of all members; a process that leaves does not call it."
            )
        if len(set(handles)) < len(handles):
            raise UsageError(f"backend unidist: reconfigure was given a handle twice among {len(handles)}")
        _address(handles[0])

    def _store_of(self, handle: str, timeout: timedelta) -> TCPStore:
        if handle == self.handle:
            return self._store
        if handle not in self._others:
            host, port = _address(handle)
            self._others[handle] = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return self._others[handle]


def _in_order(options: Membership) -> list[str]:
    given = options.handles
    return sorted(given) if isinstance(given, Set) else list(given)


def _address(handle: str) -> tuple[str, int]:
    kind, _, rest = handle.partition(":")
    host, _, port = rest.partition(":")[2].rpartition(":")
    if kind != _KIND or not host or not port.isdigit():
        raise UsageError(
            f"backend unidist: {handle!r} is not a handle of this backend; those come from get_reconfigure_handle()"
        )
    return host.strip("[]"), int(port)
