"""`unidist data-worker`: adds a data worker to a job that is running, from any host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from unidist.errors import ConfigurationError

_KEY_VARIABLE = "UNIDIST_DATA_KEY"


@click.command("data-worker")
@click.option("--join", "address", required=True, metavar="HOST:PORT", help="The job, as its launcher says.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), metavar="FILE", help=f"With the job's key; default: {_KEY_VARIABLE}."
)
def data_worker(address: str, key_file: Path | None) -> None:
    """Add a data worker to a job that is running.

    `unidist launch --data-workers N --data-key-file FILE` starts such a job, and says how to join it. The worker makes
    batches for the ranks from their next epoch on, and ends with the job.
    """
    from unidist.jobs import sealed_secret

    secret = sealed_secret(_key(key_file))
    os.set_inheritable(secret, True)
    kept = {name: value for name, value in os.environ.items() if name != _KEY_VARIABLE}
    own = {
        "UNIDIST_SECRET_FD": str(secret),
        "UNIDIST_LAUNCHER_PID": str(os.getpid()),
        "UNIDIST_JOB_VALUES": address,
        "UNIDIST_ROLE": "data",
    }
    command = [sys.executable, "-m", "unidist_data_service.worker", "--joins"]
    os.execve(sys.executable, command, {**kept, **own, "CUDA_VISIBLE_DEVICES": ""})


def _key(key_file: Path | None) -> bytes:
    if key_file is None:
        text = os.environ.get(_KEY_VARIABLE, "")
        where = _KEY_VARIABLE
        if not text:
            raise ConfigurationError(f"give --key-file, or the job's key in {_KEY_VARIABLE}; never on a command line")
    else:
        where = str(key_file)
        try:
            text = key_file.read_text()
        except OSError as exc:
            raise ConfigurationError(f"--key-file {where}: {exc.strerror}") from exc
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if not key:
        raise ConfigurationError(f"{where} has no key of a job; `unidist launch --data-key-file` writes one")
    return key
