"""A pool of ranks that mpirun starts, with as much of the interface of `RankPool` as the tests use.

mpirun is a process of `LocalProcesses`: its watchdog ends everything, however the tests end. The ranks connect to a
socket in the abstract namespace, which leaves no file, and prove themselves by a token.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from unidist.jobs.pool import call_name
from unidist.jobs.pool._call import PoolCall, PoolWorker
from unidist.jobs.pool._channel import WorkerChannel, send
from unidist.jobs.pool._pickling import dump_calls
from unidist.jobs.processes import LocalProcesses, rank_variables
from unidist.topology import Topology

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
_START_SEC = 120.0
_EXIT_SEC = 60.0
_TOKEN_BYTES = 32


def command(num_proc: int, *arguments: str) -> list[str]:
    """Return the command that runs Python with `arguments` on `num_proc` ranks, for `LocalProcesses(1).start`."""
    ours = [*rank_variables(Topology()), "UNIDIST_SECRET_FD", "UNIDIST_PROCESS_FD", "UNIDIST_LAUNCHER_PID"]
    unset = [word for name in ours for word in ("-u", name)]
    return ["env", *unset, *MPIRUN, "-n", str(num_proc), sys.executable, *arguments]


class MpiPool:
    """Ranks that run functions again and again.

    Args:
        num_proc: number of ranks.
        folder: for mpirun's own temporary files.
        env: variables for every rank.

    Attributes:
        healthy: every call so far went well.
    """

    def __init__(self, num_proc: int, folder: Path, env: Mapping[str, str]) -> None:
        self.num_proc = num_proc
        self.healthy = True
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        root = str(Path(__file__).resolve().parents[2])
        address = f"unidist/mpi-pool/{secrets.token_hex(8)}"
        variables = {**env, "TMPDIR": str(folder), "UNIDIST_TEST_TOKEN": self._token.hex(), "OMP_NUM_THREADS": "1"}
        # Not in /dev/shm: what killed ranks leave there would look like the leak of another test that runs meanwhile.
        variables["OMPI_MCA_btl_sm_backing_directory"] = str(folder)
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind("\0" + address)
            listener.listen(num_proc)
            processes = stack.enter_context(LocalProcesses(1, env=variables))
            script = str(Path(__file__).with_name("mpi_worker.py"))
            self.mpirun = processes.start(command(num_proc, script, root, address), stdin=subprocess.DEVNULL)
            self._workers = self._accept(listener, stack)
            listener.close()
            self._stack = stack.pop_all()

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        per_rank_args: Sequence[Sequence[Any]] | None = None,
        timeout: timedelta = timedelta(seconds=180),
    ) -> list[Any]:
        """See `RankPool.run`."""
        own = [()] * self.num_proc if per_rank_args is None else per_rank_args
        messages = dump_calls(func, [(*args, *each) for each in own], {})
        call = PoolCall(self._workers, call_name(func))
        try:
            call.run(messages, timeout.total_seconds())
            return call.answers.results(timeout_sec=timeout.total_seconds())
        except BaseException:
            self.healthy = False
            raise

    def close(self) -> None:
        """End the ranks, which leave MPI in order if the last call went well."""
        with self._stack:
            for worker in self._workers:
                worker.channel.close()
            if self.healthy:
                self.mpirun.wait(_EXIT_SEC)
        if self.healthy:
            assert self.mpirun.returncode == 0, f"mpirun ended with {self.mpirun.returncode}"

    def _accept(self, listener: socket.socket, stack: ExitStack) -> list[PoolWorker]:
        found: dict[int, PoolWorker] = {}
        deadline = time.monotonic() + _START_SEC
        while len(found) < self.num_proc:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            connection, _ = listener.accept()
            stack.callback(connection.close)
            connection.settimeout(_START_SEC)
            hello = connection.recv(_TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if not hmac.compare_digest(hello[:_TOKEN_BYTES], self._token):
                raise ConnectionError("something else than a rank of this pool connected")
            send(connection, pickle.dumps(list(sys.path)))
            rank = int.from_bytes(hello[_TOKEN_BYTES:], "big")
            found[rank] = PoolWorker(rank, self.mpirun, WorkerChannel(connection), None)
        return [found[rank] for rank in range(self.num_proc)]


class MpiPools:
    """Pools of one number of ranks, each started when it is first asked for; another number ends them.

    Ranks under mpirun are large, and those that are idle still poll: only those that are used are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pools: dict[tuple[object, ...], MpiPool] = {}

    def get(self, num_proc: int, *, env: Mapping[str, str] | None = None) -> MpiPool:
        """Return a healthy pool; a new one where there is none. It lives until a pool of another size is asked for."""
        key = (num_proc, *sorted((env or {}).items()))
        for other, pool in list(self._pools.items()):
            if pool.num_proc != num_proc or not pool.healthy:
                self._pools.pop(other).close()
        if key not in self._pools:
            folder = self._folder / secrets.token_hex(4)
            folder.mkdir()
            self._pools[key] = MpiPool(num_proc, folder, {"UNIDIST_ENGINE": "mpi", **variables(env)})
        return self._pools[key]

    def close(self) -> None:
        """End every pool."""
        while self._pools:
            self._pools.popitem()[1].close()


def variables(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables of a pool, with the interpreter's folder, where mpirun is, on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"PATH": path, **(env or {})}
