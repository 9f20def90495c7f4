"""Parameter servers, a directory, and workers, each in a process of its own; no launcher, no framework."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from unidist.buffer import DType
from unidist.control import ControlServer, KeyValues, KeyValueService
from unidist.jobs.processes import sealed_secret
from unidist.settings.environment import set_variables
from unidist_parameter_server.client import RemoteStore, Servers, connect_store
from unidist_parameter_server.optimizers import Rule
from unidist_parameter_server.store import Push
from unidist_parameter_server.store.memory import StoreShape
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot, cut
from unidist_parameter_server.wire import address_from, server_key

Array = np.ndarray[Any, Any]
COUNT = 1000
MEMORY = FlatMemory(DType.FLOAT64, COUNT, (ParameterSlot(0, 0, 600), ParameterSlot(1, 600, 400)))
SECRET = b"s" * 32
LONG = timedelta(seconds=60)
processes = multiprocessing.get_context("fork")


class RunningServers:
    """Servers, and the directory in which they are found.

    Args:
        number: of servers.
        secret: of the job that they belong to.
    """

    def __init__(self, number: int, secret: bytes = SECRET) -> None:
        self._secret = secret
        self.directory = ControlServer(KeyValueService(), secret, host="127.0.0.1")
        self.directory.start()
        self.programs = [self._started(server) for server in range(number)]
        self.addresses = [self._address(server) for server in range(number)]

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        secret = sealed_secret(self._secret)
        env = {
            **os.environ,
            "UNIDIST_ROLE": "ps",
            "UNIDIST_ROLE_INDEX": str(number),
            "UNIDIST_SECRET_FD": str(secret),
            "UNIDIST_JOB_VALUES": f"127.0.0.1:{self.directory.port}",
        }
        command = [sys.executable, "-m", "unidist_parameter_server.server"]
        try:
            return subprocess.Popen(command, env=env, pass_fds=[secret])
        finally:
            os.close(secret)

    def _address(self, number: int) -> tuple[str, int]:
        values = KeyValues(("127.0.0.1", self.directory.port), self._secret, rank=None, timeout=LONG, name="test")
        (found,) = values.wait([server_key(number)], LONG)
        values.close()
        return address_from(found)

    def kill(self, server: int) -> float:
        """Kill a server, and return the time."""
        self.programs[server].kill()
        self.programs[server].wait()
        return time.monotonic()

    def close(self) -> None:
        """End them."""
        for program in self.programs:
            program.terminate()
        for program in self.programs:
            try:
                program.wait(60)
            finally:
                program.kill()
        self.directory.close()


def with_servers(port: int, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a rank of a pool as in a job with servers, whose directory has this port and its secret."""
    with set_variables({"UNIDIST_JOB_VALUES": f"127.0.0.1:{port}"}):
        return call(*arguments)


class RemoteWorld:
    """Servers, and workers in forked processes.

    Args:
        num_workers: number of workers.
        num_servers: number of servers.
        replicas: see `Servers`.
        slots: names of the optimizer's arrays.
        together: gradients are collected.
        backup: see the strategy.
        log_length: see `StoreShape`.
        timeout: of the store.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int = 1,
        *,
        replicas: int = 0,
        slots: Sequence[str] = (),
        together: bool = False,
        backup: int = 0,
        log_length: int = 0,
        timeout: timedelta = LONG,
    ) -> None:
        self.shards = cut([MEMORY], 1000)
        self.shape = StoreShape(self.shards, len(slots), num_workers, 2, together, log_length)
        self.slots, self.timeout = slots, timeout
        self.needed = num_workers - backup
        self.servers = Servers(num_servers, replicas)
        self.barrier = processes.Barrier(num_workers)
        self.results: Any = processes.Queue()
        self.running: list[Any] = []
        self._running_servers = RunningServers(num_servers)
        self.programs, self.addresses = self._running_servers.programs, self._running_servers.addresses
        self.kill = self._running_servers.kill

    def store(self, worker: int, *, meets: bool = True, name: str = "store") -> RemoteStore:
        """Return the store of a worker, in its process."""

        def barrier() -> None:
            if meets:
                self.barrier.wait(60)

        store = connect_store(
            name,
            self.shape,
            self.slots,
            worker,
            self.servers,
            self.addresses,
            SECRET,
            needed=self.needed,
            barrier=barrier,
            timeout=self.timeout,
        )
        barrier()  # who has not come yet is not waited for
        return store

    def start(self, worker: int, function: Callable[[RemoteStore], Any], *, meets: bool = True) -> Any:
        """Run a function with a worker's store in a process of its own."""

        def run() -> None:
            try:
                self.results.put((worker, function(self.store(worker, meets=meets))))
            except Exception as exc:
                self.results.put((worker, exc))

        process = processes.Process(target=run, daemon=True)
        process.start()
        self.running.append(process)
        return process

    def run(self, function: Callable[[RemoteStore], Any]) -> list[Any]:
        """Run a function on all workers, and return what each has returned, or raised."""
        for worker in range(self.shape.num_workers):
            self.start(worker, function)
        return self.collect(self.shape.num_workers)

    def collect(self, number: int) -> list[Any]:
        """Return so many results, in the order of workers."""
        found = [self.results.get(timeout=90) for _ in range(number)]
        return [result for _, result in sorted(found, key=lambda result: result[0])]

    def close(self) -> None:
        """End what runs."""
        for process in self.running:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._running_servers.close()


def gradient(worker: int, number: int) -> Array:
    """Return a gradient that is known from who pushes it and when."""
    return np.random.default_rng((worker, number)).standard_normal(COUNT)


def push_of(worker: int, number: int, rule: Rule, *, whole: bool = False, **others: Any) -> Push:
    """Return a push of `gradient`; with `whole` of integers, whose sums are exact in any order."""
    values = gradient(worker, number)
    if whole:
        values = np.round(values * 1000)
    change = lambda shard: values[shard.begin : shard.begin + shard.count]  # noqa: E731
    return Push(number, change, [rule] * 2, [True] * 2, is_kept=True, **others)


def values_of(store: Any) -> Array:
    """Return all values of a store."""
    found = np.empty(COUNT)

    def receiver(index: int) -> Callable[[Array], None]:
        shard = store.shards[index]
        return lambda values: found.__setitem__(slice(shard.begin, shard.begin + shard.count), values)

    store.read_all(range(len(store.shards)), receiver)
    return found
