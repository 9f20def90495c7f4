"""Exchange of identities between the members of a process group: one job, one version, which of them share a host."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from unidist.control.messages import RELEASE
from unidist.errors import ConfigurationError, PeerLostError
from unidist.settings import read_placement
from unidist.topology import Topology
from unidist_torch_backend.store_rendezvous import StoreRendezvous


@dataclass(frozen=True)
class GroupJob:
    """The job that the members of a group must belong to. Without a name they need not belong to one.

    Args:
        name: the launcher and its key of the job; "" without one.
        rank: of this process in the job; None where that says nothing about the group.
        size: of the job.
    """

    name: str = ""
    rank: int | None = None
    size: int = 0


@dataclass(frozen=True)
class GroupMember:
    """One member, as it tells the others.

    Args:
        version: of unidist, with that of its control plane.
        host: identifies the host: its boot, its network, and the user.
        job: the launcher and the job, "" without one.
        address: at which the others reach it.
        token: random; that of rank 0 is the secret by which members on one host know each other.
        pid: of its process.
        pid_namespace: in which that number means something.
    """

    version: str
    host: str
    job: str
    address: str
    token: str
    pid: int
    pid_namespace: int


@dataclass(frozen=True)
class GroupFacts:
    """Facts that a member knows about its group.

    Args:
        rendezvous: of all members.
        topology: this process's place.
        secret: of the group.
        members: in rank order.
    """

    rendezvous: StoreRendezvous
    topology: Topology
    secret: bytes
    members: tuple[GroupMember, ...]


def meet(store: Store, rank: int, size: int, timeout: timedelta, job: GroupJob) -> GroupFacts:
    """Return who the members are. Collective over them.

    Args:
        store: PyTorch's, for this group alone.
        rank: of this process in the group.
        size: of the group.
        timeout: longest wait for the other members.
        job: of this process.

    Raises:
        ConfigurationError: on every member: their sizes, their versions or their jobs differ; or here alone: the rank
            is taken, or the launcher started another number of processes.
        StalledError: a member did not come; names it.
    """
    if not 0 <= rank < size:
        raise ConfigurationError(f"backend unidist: rank={rank} with world_size={size}: ranks are 0 to {size - 1}")
    if job.rank == rank and size > job.size:
        raise ConfigurationError(
            f"backend unidist, rank {rank}: init_process_group was called with world_size={size}, but "
            f"{job.name.split()[0]} started {job.size} process(es). Leave world_size out, or start {size}."
        )
    own = _own_member(job.name, store)
    place = _store_of_this_time(store, rank, own)
    _agree_on_size(place, rank, size)

    def check(_: Sequence[int]) -> None:
        _check_size(place, rank, size)

    rendezvous = StoreRendezvous(place, rank, size, address=own.address, check=check)
    told = [item.payload for item in rendezvous.allgather(json.dumps(asdict(own)).encode(), timeout=timeout)]
    _check_size(place, rank, size)
    members = tuple(_read_member(text) for text in told)
    _check_versions([member.version for member in members])
    _check_jobs([member.job for member in members])
    rendezvous.secret = bytes.fromhex(members[0].token)
    topology = topology_of([member.host for member in members], rank)
    return GroupFacts(rendezvous, topology, rendezvous.secret, members)


def check_alive(members: Sequence[GroupMember], ranks: Sequence[int]) -> None:
    """Raise PeerLostError if one of these members is on this host and its process has ended."""
    here, namespace = _own_host(), _pid_namespace()
    for rank in ranks:
        member = members[rank]
        if member.host == here and member.pid_namespace == namespace and not _is_alive(member.pid):
            raise PeerLostError(f"rank {rank} (process {member.pid}) died before the group was made", ranks=(rank,))


def topology_of(hosts: Sequence[str], rank: int) -> Topology:
    """Return the place of a rank among processes on these hosts, which are numbered by their first ranks."""
    order = list(dict.fromkeys(hosts))
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return Topology(rank, len(hosts), here.index(rank), len(here), order.index(hosts[rank]), len(order))


def _own_member(job: str, store: Store) -> GroupMember:
    return GroupMember(
        RELEASE, _own_host(), job, own_address(_store_host(store)), secrets.token_hex(16), os.getpid(), _pid_namespace()
    )


def _read_member(text: bytes) -> GroupMember:
    """Read what a member told; another version may tell other things."""
    told = json.loads(text)
    return GroupMember(**{name: told.get(name, "") for name in GroupMember.__dataclass_fields__})


def _store_of_this_time(store: Store, rank: int, own: GroupMember) -> Store:
    """Return the part of the store for this meeting: a group that was destroyed may meet again in the same store.

    Raises:
        ConfigurationError: another process has this rank, or had it, in an earlier job.
    """
    number = store.add(f"meetings/{rank}", 1)
    identity = f"{own.host}/{own.pid}"
    if number > 1 and (before := store.get(f"member/{rank}").decode()) != identity:
        raise ConfigurationError(
            f"backend unidist: rank {rank} is taken in this store, by process {before.rpartition('/')[2]}. Were two "
            "processes given one rank, or is the store (a file://, say) of an earlier job? Each job needs a new one."
        )
    store.set(f"member/{rank}", identity)
    return PrefixStore(f"meeting/{number}", store)


def _agree_on_size(store: Store, rank: int, size: int) -> None:
    """Raise ConfigurationError if another member came with another size first, and let the others know."""
    first = store.compare_set("size", "", f"{size} {rank}").decode()
    if first.split()[0] != str(size):
        store.set("other size", f"{size} {rank}")
        raise _sizes_differ(rank, size, first)


def _check_size(store: Store, rank: int, size: int) -> None:
    """Raise ConfigurationError if a member has come with another size."""
    if store.check(["other size"]):
        raise _sizes_differ(rank, size, store.get("other size").decode())


def _sizes_differ(rank: int, size: int, told: str) -> ConfigurationError:
    theirs, other = told.split()
    return ConfigurationError(
        f"backend unidist, rank {rank}: the group was asked for with world_size={size}, and by rank {other} with "
        f"world_size={theirs}. Pass the same on every rank."
    )


def _check_versions(versions: Sequence[str]) -> None:
    if len(set(versions)) > 1:
        listed = ", ".join(f"rank {rank}: {version or 'unknown'}" for rank, version in enumerate(versions))
        raise ConfigurationError(
            f"backend unidist: the members of a process group run different versions of unidist ({listed}). "
            "Install one version on every host."
        )


def _check_jobs(jobs: Sequence[str]) -> None:
    if len(set(jobs)) > 1:
        listed = ", ".join(f"rank {rank}: {job or 'no launcher'}" for rank, job in enumerate(jobs))
        raise ConfigurationError(
            f"backend unidist: the members of a process group are not one job ({listed}). Start all of them by one "
            "launcher, or all without one."
        )


def own_job(*, is_world: bool) -> GroupJob:
    """Return the job of this process; its rank there too, if the group is the default one and it is the launcher's.

    Children that a rank starts by `multiprocessing` inherit its variables, but are no ranks of that job.
    """
    place = read_placement()
    if place.source in ("none", "env://"):  # a few variables that anybody sets, each process on its own
        return GroupJob()
    name = place.source + ("" if place.job_key.startswith("parent=") else f" {place.job_key}")
    if not is_world or multiprocessing.parent_process() is not None:
        return GroupJob(name)
    return GroupJob(name, place.topology.rank, place.topology.world_size)


def _own_host() -> str:
    """Return a string that is equal for processes that can meet in memory: same boot, network namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return False
    return state not in ("Z", "X")


def own_address(towards: str = "") -> str:
    """Return the address at which other processes reach this one.

    Args:
        towards: a host that one of them is on; default: MASTER_ADDR. The launcher's address goes before it.
    """
    place = read_placement().meeting_place
    if place is not None:
        return place.host_address
    try:
        found = socket.getaddrinfo(towards or os.environ.get("MASTER_ADDR") or "localhost", 9, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # sends nothing: the system chooses the interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _store_host(store: Store) -> str:
    """Return the host that serves a store; "" if it is a file, or memory."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else ""
