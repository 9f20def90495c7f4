"""Starting the benchmarks that run on several ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_SEC = 1800


def under_unidist(
    module: str, num_proc: int, repetitions: int, *arguments: str, options: Sequence[str] = ()
) -> dict[str, float]:
    """Run a benchmark module under `unidist launch`, with options of it, and return its medians in seconds."""
    launch = [
        "-m",
        "unidist_launch",
        "launch",
        "-np",
        str(num_proc),
        "--env",
        "OMP_NUM_THREADS=1",
        *options,
        "-m",
        module,
    ]
    return _run([sys.executable, *launch], repetitions, arguments, {"TF_CPP_MIN_LOG_LEVEL": "3"})


def under_horovodrun(module: str, engine: str, repetitions: int) -> dict[str, float]:
    """Run a benchmark module on two ranks of Horovod, unidist over `engine`, and return its medians in seconds."""
    [port] = free_ports(1)
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable, "-m", module]
    env = {"UNIDIST_ENGINE": engine, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")
    return _run(command, repetitions, (), env | threads | {"TF_CPP_MIN_LOG_LEVEL": "3"})


def free_ports(count: int) -> list[int]:
    """Return ports of this host that are free now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _run(command: Sequence[str], repetitions: int, arguments: Sequence[str], env: dict[str, str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "medians.json"
        line = [*command, str(output), str(repetitions), *arguments]
        subprocess.run(line, check=True, cwd=ROOT, timeout=_TIMEOUT_SEC, env=os.environ | env)
        medians: dict[str, float] = json.loads(output.read_text())
    return medians
