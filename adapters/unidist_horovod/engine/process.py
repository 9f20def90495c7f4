"""The Horovod of this process, one at most: started with the first communicator, stopped with the last."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

from unidist.errors import ConfigurationError, PeerLostError
from unidist.rendezvous import Rendezvous
from unidist.settings.environment import Settings, set_variables
from unidist.topology import Topology
from unidist_horovod.bindings.interface import WORLD_SET, HorovodBinding, OperationFailed
from unidist_horovod.engine.server import AddressServer

_HOST = "localhost"


class HorovodProcess:
    """A running Horovod, shared by the communicators of this process. Made by `acquire`.

    Attributes:
        binding: its operations.
        instance: random name, equal on all ranks.
        failure: why it cannot be used any more; "" while it can.
        pid: of the process that started it; a child that it forked has no Horovod.
    """

    def __init__(
        self, binding: HorovodBinding, instance: str, environment: Mapping[str, str], *, size: int, owned: bool
    ) -> None:
        self.binding = binding
        self.instance = instance
        self.failure = ""
        self.num_users = 0
        self.pid = os.getpid()
        self._environment = environment
        self._owned = owned
        self._server: AddressServer | None = None
        self._sets = {tuple(range(size)): WORLD_SET}

    def start(self, server: AddressServer | None) -> None:
        """Start Horovod; collective. `server` lives as long as it does: process sets are made through it."""
        self._server = server
        try:
            with set_variables(self._environment):  # it has no other way to be told
                self.binding.start()
        except ValueError as exc:
            self.stop("it did not start")
            raise ConfigurationError(
                f"Horovod did not start: {exc} With HOROVOD_LOG_LEVEL=debug it says what it does."
            ) from exc

    def process_set(self, ranks: Sequence[int]) -> int | None:
        """Return the id of the process set of these ranks (of the world), or None if it has yet to be made."""
        return self._sets.get(tuple(sorted(ranks)))

    def add_process_sets(self, wanted: Sequence[tuple[int, ...]]) -> None:
        """Make process sets, of ranks in ascending order. Collective over all ranks, with equal arguments.

        Raises:
            PeerLostError: Horovod stopped.
            ConfigurationError: a Horovod that the script started itself does not allow it.
        """
        with set_variables(self._environment):
            for ranks in wanted:
                try:
                    existing = None if self._owned else self.binding.process_sets().get(ranks)
                    self._sets[ranks] = self.binding.add_process_set(ranks) if existing is None else existing
                except OperationFailed as exc:
                    if "HOROVOD_DYNAMIC_PROCESS_SETS" in str(exc):
                        raise ConfigurationError(
                            "the script called hvd.init() itself, without room for process sets. Call it after "
                            'unidist\'s init(), leave it out, or use hvd.init(process_sets="dynamic").'
                        ) from exc
                    self.failure = self.failure or str(exc)
                    raise PeerLostError(f"making the process set {list(ranks)}: {exc}") from exc

    def stop(self, reason: str) -> None:
        """Stop Horovod, unless the script started it. Idempotent."""
        if not self.failure:
            self.failure = reason
            if self._owned:
                self.binding.stop()
        self.binding.release()
        if self._server is not None:
            self._server.close()
            self._server = None


_lock = threading.Lock()
_current: HorovodProcess | None = None


def acquire(
    binding: HorovodBinding, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta
) -> HorovodProcess:
    """Return the running Horovod, started if it is not. Collective; each call is answered by one `release`.

    Raises:
        ConfigurationError: Horovod does not start, or the script started it for other ranks.
    """
    global _current
    with _lock:
        if _current is not None and not _current.failure and binding.is_running():
            instance = _current.instance
        else:
            instance = "foreign" if _current is None and binding.is_running() else ""
        replies = [item.payload.decode() for item in rendezvous.allgather(instance.encode(), timeout=timeout)]
        if instance and set(replies) == {instance}:
            if _current is None:
                _current = _adopted(binding, topology)
        else:
            if _current is not None:
                _current.stop("another rank has stopped Horovod")
            elif instance:
                binding.stop()  # a Horovod of the script's that some ranks have, and some have not, is of no use
            _current = _started(binding, topology, rendezvous, timeout)
        _current.num_users += 1
        return _current


def release(process: HorovodProcess) -> None:
    """Give back what `acquire` returned; the last one stops Horovod."""
    global _current
    with _lock:
        process.num_users -= 1
        if process.num_users == 0:
            process.stop("its last communicator was closed")
            if _current is process:
                _current = None


def _adopted(binding: HorovodBinding, topology: Topology) -> HorovodProcess:
    if binding.place() != (topology.rank, topology.world_size):
        rank, size = binding.place()
        raise ConfigurationError(
            f"the script has started Horovod as rank {rank} of {size}, but this is rank {topology.rank} of "
            f"{topology.world_size}. Leave its hvd.init() out, or call it after unidist's init()."
        )
    return HorovodProcess(binding, "foreign", {}, size=topology.world_size, owned=False)


def _started(binding: HorovodBinding, topology: Topology, rendezvous: Rendezvous, timeout: timedelta) -> HorovodProcess:
    """Start Horovod by its own rendezvous server if `horovodrun` gave one, else by one that rank 0 starts here."""
    given = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
    server = AddressServer(topology, _HOST) if topology.rank == 0 and topology.world_size > 1 and not given else None
    try:
        offer = json.dumps({"port": server.port if server else 0, "instance": secrets.token_hex(8)}).encode()
        leader = json.loads(rendezvous.allgather(offer, timeout=timeout)[0].payload)
        environment = _chosen_variables()
        if not given:
            environment |= _place_variables(topology, leader["port"])
        process = HorovodProcess(binding, leader["instance"], environment, size=topology.world_size, owned=True)
        process.start(server)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return process


def _place_variables(topology: Topology, port: int) -> dict[str, str]:
    variables = {
        "HOROVOD_RANK": topology.rank,
        "HOROVOD_SIZE": topology.world_size,
        "HOROVOD_LOCAL_RANK": topology.local_rank,
        "HOROVOD_LOCAL_SIZE": topology.local_size,
        "HOROVOD_CROSS_RANK": topology.node_rank,
        "HOROVOD_CROSS_SIZE": topology.num_nodes,
        "HOROVOD_HOSTNAME": _HOST,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
    }
    if topology.world_size > 1:
        variables |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    return {name: str(value) for name, value in variables.items()}


def _chosen_variables() -> dict[str, str]:
    """Return what the user chose in unidist's words, in Horovod's; Horovod's own variables come first."""
    settings, default = Settings.read(), Settings()
    chosen = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    if settings.fusion_threshold_bytes != default.fusion_threshold_bytes:
        chosen["HOROVOD_FUSION_THRESHOLD"] = str(settings.fusion_threshold_bytes)
    if settings.cache_capacity != default.cache_capacity:
        chosen["HOROVOD_CACHE_CAPACITY"] = str(settings.cache_capacity)
    if settings.cycle_time != default.cycle_time:
        chosen["HOROVOD_CYCLE_TIME"] = str(settings.cycle_time / timedelta(milliseconds=1))
    if not settings.stall_check:
        chosen["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    elif settings.stall_check != default.stall_check:
        chosen["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(max(1, round(settings.stall_check.total_seconds())))
    if settings.stall_shutdown:
        chosen["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(max(1, round(settings.stall_shutdown.total_seconds())))
    return {name: value for name, value in chosen.items() if name not in os.environ or "DYNAMIC" in name}
