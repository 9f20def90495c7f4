"""The engine `tcp`. Importing this module needs no C code: without it the engine says so."""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from datetime import timedelta

from unidist.communicator import Communicator, format_ranks
from unidist.engine import Availability, Engine
from unidist.errors import ConfigurationError
from unidist.rendezvous import Rendezvous
from unidist.settings import Settings, job_secret
from unidist.topology import Topology
from unidist_tcp import encryption

MAX_RANKS = 1024
_FIXED = struct.Struct(f"!BHB?{16}sB")  # protocol, port, connections of a pair, encrypts, session, length of a secret
_SECRET_BYTES = 32
_CONNECT_SEC = 10.0
_CONNECT_HEARTBEATS = 4
"""Longest time to connect, the longer of the two: all have just met, so what does not answer by then is cut off."""

_SPIN_NS = 50_000
_PATIENCE = 1.75
"""Heartbeats until a silent peer counts as lost: later than the coordinator of an elastic job finds out, who decides
which ranks go on, and before two have passed."""


class TcpEngine(Engine):
    """Connects processes on any hosts over TCP."""

    def availability(self) -> Availability:
        """Usable on Linux where the C code was built."""
        try:
            from unidist_tcp import _tcp  # noqa: F401 - only whether it can be imported
        except ImportError as exc:
            return Availability(False, f"the C code is not built ({exc}); reinstall unidist-train with a C compiler")
        if Settings.read().tls and (problem := encryption.problem()):
            return Availability(False, problem)
        return Availability(True, "built in")

    def supports(self, topology: Topology) -> Availability:
        """Support any hosts, and up to `MAX_RANKS` ranks."""
        if topology.world_size > MAX_RANKS:
            return Availability(False, f"connects at most {MAX_RANKS} ranks")
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Connect every two ranks, with a proof of the job's secret on each connection."""
        from unidist_tcp.communicator import Connections, TcpCommunicator
        from unidist_tcp.connecting import connect_all, listen, tune
        from unidist_tcp.handshake import PROTOCOL, SESSION_BYTES, Session

        settings = Settings.read()
        if settings.tls and (problem := encryption.problem()):
            raise ConfigurationError(f"rank {topology.rank}: {problem}")
        rank, size = topology.rank, topology.world_size
        handed_on = secrets.token_bytes(_SECRET_BYTES) if topology.single_host and rank == 0 else b""
        shared = job_secret() or rendezvous.secret
        if not topology.single_host and not shared:
            raise ConfigurationError(
                f"rank {rank}: this job spans {topology.num_nodes} hosts, and its launcher has given it no secret, by "
                "which its ranks could know each other. Start it with `unidist launch`"
            )
        try:
            listener = listen(rendezvous.address)
        except OSError as exc:
            raise ConfigurationError(
                f"tcp: rank {rank} cannot listen at {rendezvous.address}, its address in the job: {exc.strerror or exc}"
            ) from exc
        try:
            own = _FIXED.pack(
                PROTOCOL,
                listener.getsockname()[1],
                settings.tcp_connections,
                settings.tls,
                secrets.token_bytes(SESSION_BYTES),
                len(handed_on),
            )
            replies = rendezvous.allgather(own + handed_on + rendezvous.address.encode(), timeout=timeout)
            _check_versions([item.payload[:1] for item in replies])
            fields = [_FIXED.unpack_from(item.payload) for item in replies]
            _check_encryption([is_encrypted for _, _, _, is_encrypted, _, _ in fields])
            _, _, num_lanes, _, name, length = fields[0]
            first = replies[0].payload[_FIXED.size : _FIXED.size + length]
            session = Session(
                first or hmac.digest(shared, b"unidist tcp", "sha256"), name, size, num_lanes, settings.tls
            )
            addresses = [
                (item.payload[_FIXED.size + reply[-1] :].decode(), reply[1])
                for item, reply in zip(replies, fields, strict=True)
            ]
            limit = min(timeout, max(timedelta(seconds=_CONNECT_SEC), _CONNECT_HEARTBEATS * settings.heartbeat))
            lanes = connect_all(rank, addresses, session, listener, timeout=limit)
        except BaseException:
            listener.close()
            raise
        for each in lanes:
            for lane in each:
                tune(lane.descriptor, settings.heartbeat)
        crowded = topology.local_size > len(os.sched_getaffinity(0))
        connections = Connections(
            rank, lanes, spin_ns=0 if crowded else _SPIN_NS, heartbeat=_PATIENCE * settings.heartbeat
        )
        return TcpCommunicator(connections, 0, rank, tuple(range(size)), timeout)


def _check_versions(versions: list[bytes]) -> None:
    """Refuse a job whose ranks have different versions of the engine; on every rank."""
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise ConfigurationError(
                f"rank {rank} runs version {version.hex()} of the engine tcp, and rank 0 version {versions[0].hex()}; "
                "install one version of unidist for all"
            )


def _check_encryption(is_encrypted: list[bool]) -> None:
    """Refuse a job of which some ranks encrypt; on every rank."""
    with_it = [rank for rank, encrypts in enumerate(is_encrypted) if encrypts]
    if len(with_it) not in (0, len(is_encrypted)):
        without = [rank for rank, encrypts in enumerate(is_encrypted) if not encrypts]
        raise ConfigurationError(
            f"rank(s) {format_ranks(with_it)} encrypt what they send (--tls, UNIDIST_TLS=1), and rank(s) "
            f"{format_ranks(without)} do not. Start all ranks with it, or none."
        )
