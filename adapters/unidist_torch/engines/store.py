"""The stores over which torch.distributed's process groups find their peers.

gloo's is served by rank 0, at its address in the job, to processes that know the job's secret: anyone who can write to
the store decides which addresses the ranks connect to. NCCL calls its store from its own threads, even while Python
shuts down, so it gets torch's `TCPStore`, which has no secret; it listens at that address and nowhere else.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from unidist.control import ControlServer, KeyValues, KeyValueService
from unidist.errors import ConfigurationError
from unidist.rendezvous import Rendezvous
from unidist.settings import job_secret
from unidist.topology import Topology

_PORT = struct.Struct("!H")
_SECRET_BYTES = 32


class SharedStore:
    """A store that a communicator and those split from it use; closed with the last of them.

    Args:
        store: torch's.
        close: closes it.
    """

    def __init__(self, store: Store, close: Callable[[], None]) -> None:
        self.store = store
        self._close = close
        self._num_users = 0
        self._lock = threading.Lock()

    def share(self) -> None:
        """One more uses it."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """One has done with it."""
        with self._lock:
            self._num_users -= 1
            is_last = not self._num_users
        if is_last:
            self._close()


class _JobStore(Store):
    """The store that gloo needs, on top of `KeyValues`."""

    def __init__(self, values: KeyValues, timeout: timedelta) -> None:
        super().__init__()
        self._values = values
        self._timeout = timeout
        self._fetched: dict[str, bytes] = {}  # by `wait`, which gloo calls before each `get`; keys are set once

    def set(self, key: str, value: bytes | str) -> None:
        self._values.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        fetched = self._fetched.pop(key, None)
        return self._values.wait([key], self._timeout)[0] if fetched is None else fetched

    def check(self, keys: list[str]) -> bool:
        return self._values.present(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        values = self._values.wait(list(keys), self._timeout if timeout is None else timeout)
        self._fetched.update(zip(keys, values, strict=True))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


def authenticated_store(topology: Topology, rendezvous: Rendezvous, timeout: timedelta) -> SharedStore:
    """Return a store that rank 0 serves on a free port of its address in the job. Collective over all ranks.

    The secret of a job on one host is a random one that rank 0 hands to the others over their local socket. Between
    hosts it is derived from the job's: what the rendezvous carries can be read there.

    Raises:
        ConfigurationError: the job spans several hosts, and its launcher gave it no secret.
        StalledError: a rank did not come.
        PeerLostError: a rank came and died.
    """
    with ExitStack() as stack:
        server, handed_on = None, b""
        if not topology.single_host:
            if not job_secret():
                raise ConfigurationError(
                    f"rank {topology.rank}: this job spans {topology.num_nodes} hosts, and its launcher has given "
                    "it no secret, by which its ranks could know each other. Start it with `unidist launch`"
                )
            secret = hmac.digest(job_secret(), b"unidist store", "sha256")
        if topology.rank == 0:
            if topology.single_host:
                secret = handed_on = secrets.token_bytes(_SECRET_BYTES)
            server = stack.enter_context(ControlServer(KeyValueService(), secret, host=rendezvous.address))
        port, address, given = _from_rank_0(rendezvous, timeout, None if server is None else server.port, handed_on)
        values = KeyValues((address, port), given or secret, rank=topology.rank, timeout=timeout)
        stack.callback(values.close)
        return SharedStore(_JobStore(values, timeout), stack.pop_all().close)


def tcp_store(rank: int, rendezvous: Rendezvous, timeout: timedelta) -> SharedStore:
    """Return torch's own store, which rank 0 of a rendezvous serves on a free port of its address. Collective there.

    Raises:
        As `authenticated_store`.
    """
    store = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in rendezvous.address else socket.AF_INET
        listener = socket.create_server((rendezvous.address, 0), family=family, backlog=1024)
        listener.setblocking(False)
        store = TCPStore(
            rendezvous.address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    port, address, _ = _from_rank_0(rendezvous, timeout, None if store is None else store.port, b"")
    if store is None:
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return SharedStore(store, lambda: None)


def _from_rank_0(rendezvous: Rendezvous, timeout: timedelta, port: int | None, secret: bytes) -> tuple[int, str, bytes]:
    """Tell all ranks where rank 0 serves; return its port, its address and the secret that it handed on."""
    own = b"" if port is None else _PORT.pack(port) + bytes([len(secret)]) + secret + rendezvous.address.encode()
    told = rendezvous.allgather(own, timeout=timeout)[0].payload
    length = told[_PORT.size]
    start = _PORT.size + 1
    return _PORT.unpack_from(told)[0], told[start + length :].decode(), told[start : start + length]
