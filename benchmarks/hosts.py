"""All-reduce on eight ranks of two hosts, which are network namespaces of this machine, beside gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.jobs import ROOT
from unidist_bench import read

sys.path.insert(0, str(ROOT / "tests" / "helpers"))
import ssh_hosts  # the hosts of the tests

RANKS_PER_HOST = 4
_TIMEOUT_SEC = 900


def why_not() -> str:
    """Return why such hosts cannot be made here; "" if they can."""
    return ssh_hosts.why_not()


def measure(size: str) -> tuple[float, float]:
    """Return the medians of unidist and of gloo for an all-reduce of `size`, in seconds."""
    with ssh_hosts.SshHosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        where = ",".join(f"{address}:{RANKS_PER_HOST}" for address in hosts.addresses)
        command = [
            *(sys.executable, "-m", "unidist_launch", "bench", "allreduce", "-b", size, "-e", size),
            *("--beside", "gloo", "--json", str(output), "-np", str(2 * RANKS_PER_HOST), "-H", where),
            *("--ssh-command", hosts.ssh_command, "--env", "OMP_NUM_THREADS=1"),
        ]
        subprocess.run(command, check=True, cwd=ROOT, timeout=_TIMEOUT_SEC, env=os.environ, stdout=subprocess.DEVNULL)
        ((row,),) = (series.rows for series in read(output).series)
    return row.sides["unidist"].median, row.sides["gloo"].median
