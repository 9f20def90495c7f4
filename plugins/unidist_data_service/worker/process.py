"""The process of a data worker: tells the job its address, and ends with the job."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from unidist.control import KeyValues, format_address, job_values
from unidist.errors import ConfigurationError, PeerLostError
from unidist.settings import job_secret, values_place
from unidist_data_service.keys import KEY_FILE_VARIABLE, worker_key
from unidist_data_service.worker.server import DataWorker

_LOOK_SEC = 1.0
_MAX_WORKERS = 10_000


def run_worker(environ: Mapping[str, str] | None = None, *, joins: bool = False) -> None:
    """Make batches for the ranks of a job until it ends, or SIGTERM comes.

    Args:
        environ: the environment, default: that of this process.
        joins: it was not started by the launcher, and takes the next free number.

    Raises:
        ConfigurationError: there is no job.
        PeerLostError, StalledError: the launcher cannot be reached.
    """
    env = os.environ if environ is None else environ
    values = job_values(env, timeout=timedelta(seconds=60))
    host = env.get("UNIDIST_HOST_ADDRESS") or _own_address(values_place(env).address)
    number = int(env.get("UNIDIST_ROLE_INDEX", "0"))
    worker = DataWorker(f"data worker {number}", job_secret(), host=host)
    try:
        address = json.dumps([host, worker.port]).encode()
        if joins:
            number = _join(values, address)
            worker.name = f"data worker {number}"
            print(f"unidist: this is data worker {number} of the job; Ctrl-C ends it", flush=True)
        else:
            values.set(worker_key(number), address)
            if KEY_FILE_VARIABLE in env:
                _write_key(env[KEY_FILE_VARIABLE], values_place(env).address)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: worker.stop())
        threading.Thread(target=_end_with_job, args=(values, worker), name="unidist-data-job", daemon=True).start()
        worker.start()
        worker.run()
    finally:
        worker.close()


def _join(values: KeyValues, address: bytes) -> int:
    for number in range(_MAX_WORKERS):
        if values.claim(worker_key(number), address) == address:
            return number
    raise AssertionError("there is a free number")


def _write_key(path: str, job: tuple[str, int]) -> None:
    """Write the job's key to a file that its owner alone can read, and say how to join."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # it may be readable for others
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(job_secret().hex() + "\n")
    except OSError as exc:
        raise ConfigurationError(f"--data-key-file {path}: {exc.strerror}") from exc
    where = format_address(job)
    print(f"others join by: unidist data-worker --join {where} --key-file {os.path.basename(path)}", flush=True)


def _end_with_job(values: KeyValues, worker: DataWorker) -> None:
    pause = threading.Event()
    try:
        while not pause.wait(_LOOK_SEC):
            values.get([])
    except PeerLostError:
        worker.stop()


def _own_address(server: tuple[str, int]) -> str:
    """Return the address of this host towards the launcher."""
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(server)
        return str(probe.getsockname()[0])
