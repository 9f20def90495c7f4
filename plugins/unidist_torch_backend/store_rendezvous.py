"""A rendezvous over the store that PyTorch hands to a backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from typing_extensions import override

from unidist.communicator import format_ranks
from unidist.errors import PeerLostError, StalledError, UsageError
from unidist.rendezvous import Contribution, Rendezvous

_SLICE = timedelta(seconds=2)
"""A wait for the store cannot be interrupted; between two of them Python handles signals."""


class StoreRendezvous(Rendezvous):
    """Exchanges contributions of the members of a group as keys of a store.

    Args:
        store: of all members, with a prefix that nobody else uses.
        rank: of this process in the group.
        size: number of members.
        address: at which the other members reach this process.
        check: called now and then with the members that are waited for; raises if one of them cannot come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        address: str = "127.0.0.1",
        check: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.address = address
        self._store = store
        self._rank = rank
        self._size = size
        self._check = check
        self._round = 0

    @override
    def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
        """Exchange payloads with the other members; descriptors cannot be sent through a store."""
        if fds:
            raise UsageError("open descriptors cannot be sent through a store of torch.distributed")
        number, self._round = self._round, self._round + 1
        deadline = time.monotonic() + timeout.total_seconds()
        keys = [f"{number}/{member}" for member in range(self._size)]
        try:
            self._store.set(keys[self._rank], payload.hex())
            self._wait(keys, deadline, timeout)
            return [Contribution(bytes.fromhex(self._store.get(key).decode())) for key in keys]
        except RuntimeError as exc:
            if isinstance(exc, PeerLostError):
                raise
            raise PeerLostError(
                f"rank {self._rank} lost the store of its process group: {exc}. Has the rank that serves it ended?"
            ) from exc

    @override
    def close(self) -> None:
        """Nothing to release: the store is PyTorch's."""

    def _wait(self, keys: Sequence[str], deadline: float, timeout: timedelta) -> None:
        missing = list(keys)
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                ranks = [keys.index(key) for key in missing]
                raise StalledError(
                    f"rank {self._rank} waited {timeout.total_seconds():g} s for rank(s) {format_ranks(ranks)} of a "
                    f"process group of {self._size} to connect. Was world_size={self._size} meant, and did all of them "
                    "start? Look for an earlier error of theirs.",
                    ranks=ranks,
                )
            if self._check is not None:
                self._check([keys.index(key) for key in missing])
            try:
                self._store.wait([missing[0]], min(_SLICE, timedelta(seconds=max(left, 0.001))))
            except RuntimeError:  # the time is up, or the connection is lost: then the next call raises outside of here
                self._store.check([missing[0]])
            missing = [key for key in missing if not self._store.check([key])]
