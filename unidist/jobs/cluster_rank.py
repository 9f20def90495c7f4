"""A process that somebody else has started, an actor or a task of a cluster, as one rank of a job.

A cluster starts processes where it has room for them and can carry a few bytes between them. That is all it takes: each
process makes an offer, every one gets the offers of all, and from these each works out the same places. The process of
rank 0 has the control server over which the ranks of several nodes meet.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from unidist.control.connection import format_address
from unidist.control.coordinator import Coordinator
from unidist.control.messages import RELEASE
from unidist.control.server import ControlServer
from unidist.errors import ConfigurationError
from unidist.jobs.network import interface_address, own_address
from unidist.jobs.processes import (
    HostShare,
    check_not_reserved,
    free_port,
    rank_defaults,
    rank_variables,
    sealed_secret,
)
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist.topology import Topology

_SECRET_BYTES = 32


@dataclass(frozen=True)
class _Offer:
    """Facts that a process reports to the others about itself.

    Args:
        version: of unidist.
        member: random name of the process; the secret of the job is that of the first one.
        secret: in hexadecimal.
        node: processes of the same node share memory.
        address: at which the others reach it.
        port: of its control server.
        master_port: one that is free, for the script's own torch.distributed.
    """

    version: str
    member: str
    secret: str
    node: str
    address: str
    port: int
    master_port: int


class ClusterRank:
    """This process as a rank of a job whose processes a cluster started. A context manager; leaving it closes it.

    Every process makes one, the cluster brings the offer of each to all, and each takes its place:

        with ClusterRank() as rank, rank.joined(cluster_allgather(rank.offer)) as place:
            train()  # calls init() itself

    The offer holds a secret: whoever reads it can pretend to be a rank. Send it over the cluster's own channel alone.

    Args:
        node: a name of the node; processes that give the same exchange data in shared memory. Default: the processes
            that can, which are those of this user on this machine, in the same container.
        address: IP address at which the other nodes reach this process; default: that of the interface to the outside.
        interfaces: the address is that of the first of these network interfaces that this host has, whatever `address`
            says; empty: it is `address`.

    Raises:
        ConfigurationError: this host has no such address, or no such interface.
    """

    def __init__(self, *, node: str = "", address: str = "", interfaces: Sequence[str] = ()) -> None:
        address = interface_address(interfaces) if interfaces else address or own_address()
        self._coordinator = Coordinator(num_hosts=0, world_size=1, heartbeat=timedelta(seconds=5))
        secret = secrets.token_bytes(_SECRET_BYTES)
        try:
            self._server = ControlServer(self._coordinator, secret, host=address)
            master_port = free_port(address)
        except OSError as exc:
            raise ConfigurationError(
                f"address {address!r}: host {socket.gethostname()} cannot listen there ({exc}). Name an address of its "
                "own at which the other nodes reach it."
            ) from exc
        self._own = _Offer(
            version=RELEASE,
            member=secrets.token_hex(8),
            secret=secret.hex(),
            node=node or _shared_memory_domain(),
            address=address,
            port=self._server.port,
            master_port=master_port,
        )
        self.offer: str = json.dumps(asdict(self._own))
        """What the other processes need to know of this one: a line of text."""

    def share(self, offers: Sequence[str]) -> HostShare:
        """Return the place of this process, which then has the meeting of the ranks if it is rank 0. To be called once.

        It is for `LocalProcesses` or `RankPool`, where the rank is to be a child of this process; see `joined` for a
        process that becomes the rank itself.

        Args:
            offers: of all processes of the job, this one's included, in the same order everywhere. Ranks follow that
                order, but those of a node are next to each other.

        Raises:
            ConfigurationError: offers are missing, come twice, or are of another version of unidist.
        """
        members = [_read(offer) for offer in offers]
        self._check(members)
        ordered, places = arrange(members)
        first = ordered[0]
        place = places[[each.member for each in ordered].index(self._own.member)]
        variables: dict[str, str] = {}
        if not place.single_host:
            if first == self._own:
                list(self._coordinator.begin_generation(place.world_size))  # nobody is there yet to be told of it
                self._server.start()
            variables = {
                "UNIDIST_CONTROL_ADDRESS": format_address((first.address, first.port)),
                "UNIDIST_HOST_ADDRESS": self._own.address,
                "UNIDIST_GENERATION": "1",
            }
        defaults = {"MASTER_ADDR": first.address, "MASTER_PORT": str(first.master_port)}
        # Ranks of a host meet by what stands before the slash; each process sweeps its own, by all of it.
        job_id = f"{first.member}.{place.node_rank}/{self._own.member}"
        return HostShare(job_id, bytes.fromhex(first.secret), (place,), variables, defaults)

    @contextmanager
    def joined(self, offers: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[Topology]:
        """Let this process be the rank: within the block, `init()` finds the place, which is the block's value.

        At the end of the block the runtime is shut down, whether the script has done it or not. If the block ends with
        an error, operations that the other ranks wait in end with PeerLostError, too.

        Args:
            offers: as for `share`.
            env: variables of this process within the block.

        Raises:
            ConfigurationError: as `share`; or `env` sets what only this class can know.
        """
        share = self.share(offers)
        user = dict(env or {})
        check_not_reserved(user, share)
        place = share.places[0]
        context.begin_job()
        descriptor = sealed_secret(share.secret)
        variables = {
            **rank_defaults(place.local_size, user, share.defaults),
            **user,
            **rank_variables(place),
            **share.variables,
            "UNIDIST_JOB_ID": share.job_id,
            "UNIDIST_SECRET_FD": str(descriptor),
            "UNIDIST_LAUNCHER_PID": str(os.getpid()),
        }
        try:
            with set_variables(variables):
                try:
                    yield place
                except BaseException as exc:
                    if context.is_initialized():
                        context.current().abort(f"rank {place.rank} ended with {type(exc).__name__}: {exc}")
                    raise
                finally:
                    context.shutdown()
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """End the meeting of the ranks, if this process has it. Idempotent."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, members: Sequence[_Offer]) -> None:
        names = [each.member for each in members]
        if names.count(self._own.member) != 1 or len(set(names)) < len(names):
            raise ConfigurationError(
                f"{len(members)} offers of {len(set(names))} processes, {names.count(self._own.member)} of them this "
                "one's: each process of the job makes one offer, and every one gets all of them."
            )
        for each in members:
            if each.version != RELEASE:
                raise ConfigurationError(
                    f"unidist {RELEASE} is installed on host {socket.gethostname()} ({self._own.address}), but "
                    f"{each.version} at {each.address}; install the same on all hosts."
                )


def rank_order(offers: Sequence[str]) -> list[int]:
    """Return the rank of each offer's process, in the order of the offers; for who has collected them."""
    members = [_read(offer) for offer in offers]
    ordered, _ = arrange(members)
    ranks = {each.member: rank for rank, each in enumerate(ordered)}
    return [ranks[each.member] for each in members]


def arrange(members: Sequence[_Offer]) -> tuple[list[_Offer], list[Topology]]:
    """Return processes in rank order, and their places. Nodes come in the order of their first processes."""
    by_node: dict[str, list[_Offer]] = {}
    for member in members:
        by_node.setdefault(member.node, []).append(member)
    ordered: list[_Offer] = []
    places: list[Topology] = []
    for node_rank, group in enumerate(by_node.values()):
        for local_rank, member in enumerate(group):
            place = Topology(len(ordered), len(members), local_rank, len(group), node_rank, len(by_node))
            ordered.append(member)
            places.append(place)
    return ordered, places


def _read(offer: str) -> _Offer:
    try:
        return _Offer(**json.loads(offer))
    except (ValueError, TypeError):
        raise ConfigurationError(
            f"{offer[:40]!r}... is not the offer of a ClusterRank of unidist {RELEASE}; is another version "
            "installed there?"
        ) from None


def _shared_memory_domain() -> str:
    """Return what is equal for processes that can pass each other descriptors of memory, and tells others apart."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return "/".join(map(str, (socket.gethostname(), boot, *namespaces, os.getuid())))
