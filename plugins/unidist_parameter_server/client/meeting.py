"""Connects the ranks of a group to a store on servers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.control import job_values
from unidist.errors import ConfigurationError, UnidistError
from unidist.settings import Settings, job_secret
from unidist_parameter_server.client.link import SegmentLink, ServerAddresses
from unidist_parameter_server.client.store import RemoteStore
from unidist_parameter_server.store.memory import StoreShape
from unidist_parameter_server.store.placement import assign
from unidist_parameter_server.wire import SERVER_ROLE, SegmentLayout, address_from, server_key

_TOKEN_BYTES = 16
_MESSAGE_BYTES = 1000


@dataclass(frozen=True)
class Servers:
    """The servers of a job.

    Args:
        number: how many.
        replicas: copies of each segment on other servers: 0 or 1.
    """

    number: int
    replicas: int


def make_remote_store(
    communicator: Communicator, shape: StoreShape, slots: Sequence[str], servers: Servers, *, needed: int
) -> RemoteStore:
    """Return the store of the ranks of a group, which are its workers. Collective.

    Args:
        communicator: over the workers.
        shape: equal on every rank.
        slots: names of the optimizer's arrays.
        servers: equal on every rank.
        needed: number of gradients that make a synchronous step; if there are any (`shape.collects`).

    Raises:
        ConfigurationError: on every rank: a server cannot be reached, or has too little memory; says how much it needs.
    """
    token = bytearray(secrets.token_bytes(_TOKEN_BYTES))
    communicator.broadcast(Buffer.of(token), root=0).wait()
    store: RemoteStore | None = None
    problem = ""
    try:
        if Settings.read().tls:
            raise ConfigurationError(
                "--tls and parameter_server:servers: what workers and servers send to each other is not encrypted. "
                "Leave --tls or the servers out"
            )
        store = connect_store(
            token.hex(),
            shape,
            slots,
            communicator.rank,
            servers,
            addresses_of(servers.number, communicator.timeout),
            job_secret(),
            needed=needed,
            barrier=lambda: communicator.barrier().wait(),
            timeout=communicator.timeout,
        )
    except UnidistError as exc:
        problem = str(exc)
    try:
        _agree(communicator, problem)
    except BaseException:
        if store is not None:
            store.leave()
        raise
    assert store is not None
    return store


def connect_store(
    name: str,
    shape: StoreShape,
    slots: Sequence[str],
    worker: int,
    servers: Servers,
    addresses: ServerAddresses,
    secret: bytes,
    *,
    needed: int,
    barrier: Callable[[], None],
    timeout: timedelta,
) -> RemoteStore:
    """Return one worker's store. The servers make it when the first worker comes.

    Args:
        name: of the store, unique in the job.
        shape: equal on every worker.
        slots: names of the optimizer's arrays.
        worker: number of this worker.
        servers: equal on every worker.
        addresses: of the servers.
        secret: the job's.
        needed: number of gradients that make a synchronous step.
        barrier: returns when all workers have called it.
        timeout: longest wait for other workers.

    Raises:
        ConfigurationError, UsageError, PeerLostError: as `SegmentLink`.
    """
    used = [(number, part) for number, part in enumerate(assign(shape.shards, servers.number)) if len(part)]
    links: list[SegmentLink] = []
    try:
        for number, part in used:
            layout = SegmentLayout(
                store=name,
                segment=number,
                shards=tuple(shape.shards[part.start : part.stop]),
                num_slots=shape.num_slots,
                num_workers=shape.num_workers,
                num_parameters=shape.num_parameters,
                needed=needed if shape.collects else 0,
                log_length=shape.log_length,
                backup=(number + 1) % servers.number if servers.replicas else None,
            )
            links.append(SegmentLink(layout, worker, addresses, secret, timeout_sec=timeout.total_seconds()))
    except BaseException:
        for link in links:
            link.leave()
        raise
    parts = [part for _, part in used]
    return RemoteStore(shape.shards, slots, worker, shape.num_workers, parts=parts, links=links, barrier=barrier)


def addresses_of(number: int, timeout: timedelta) -> ServerAddresses:
    """Return where the servers listen, as they have told the job's directory; waits until all have."""
    values = job_values()
    try:
        names = [f"{SERVER_ROLE} {server}" for server in range(number)]
        found = values.wait([server_key(server) for server in range(number)], timeout, of=names)
    finally:
        values.close()
    return [address_from(value) for value in found]


def _agree(communicator: Communicator, problem: str) -> None:
    """Raise the problem of any rank on every rank. Collective."""
    own = bytearray(problem.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"))
    every = bytearray(_MESSAGE_BYTES * communicator.size)
    communicator.allgather(Buffer.of(own), Buffer.of(every)).wait()
    told = [
        every[begin : begin + _MESSAGE_BYTES].rstrip(b"\0").decode(errors="replace")
        for begin in range(0, len(every), _MESSAGE_BYTES)
    ]
    found = next(filter(None, [problem, *told]), "")
    if found:
        raise ConfigurationError(found)
