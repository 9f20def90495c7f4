"""Jobs on several nodes of a real Slurm, each a network namespace with a slurmd of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_cluster import why_not as why_no_slurm
from ssh_hosts import SshHosts
from ssh_hosts import why_not as why_no_hosts

WHY_NOT = why_no_hosts() or why_no_slurm()
pytestmark = [pytest.mark.soak, pytest.mark.parallel, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "none")]

HEARTBEAT_SEC = 3.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: SshHosts) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts) as made:
        yield made


def start(cluster: SlurmCluster, folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    """Start a script on two tasks of each of three nodes, from outside of them, as from a login node."""
    (folder / "script.py").write_text(
        "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script)
    )
    salloc = ("salloc", "--quiet", "--nodes", "3", "--ntasks-per-node", "2")
    return subprocess.Popen(
        [*salloc, sys.executable, "-m", "unidist_launch", "launch", *options, "script.py"],
        cwd=folder,
        env={**cluster.env, "UNIDIST_HEARTBEAT_SEC": str(HEARTBEAT_SEC)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: object, seconds: float) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_ranks_of_all_nodes_reduce(cluster: SlurmCluster, hosts: SshHosts, tmp_path: Path) -> None:
    script = """
        import array, socket
        from unidist.runtime import context
        from unidist.buffer import Buffer
        print(socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["UNIDIST_HOST_ADDRESS"])
        world = context.init().world
        values, sums = array.array("d", [world.rank + 1.0] * 1000), array.array("d", [0.0] * 1000)
        world.allreduce(Buffer.of(values), Buffer.of(sums)).wait()
        print(set(sums), flush=True)
        context.shutdown()
    """
    with start(cluster, tmp_path, script) as launcher:
        out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, err
    lines = out.splitlines()
    for rank in range(6):
        assert f"[{rank}] h{rank // 2 + 1} {rank % 2} {hosts.addresses[rank // 2]}" in lines, err
    assert "[0-5] {21.0}" in lines or sum("{21.0}" in line for line in lines) > 1


def test_a_node_that_fails_ends_the_job_on_all(cluster: SlurmCluster, hosts: SshHosts, tmp_path: Path) -> None:
    script = "open(f'ready{rank}', 'w')\nfor _ in range(3000): time.sleep(0.1)"
    with start(cluster, tmp_path, script, "--grace-period", "1") as launcher:
        try:
            files = [tmp_path / f"ready{rank}" for rank in range(6)]
            assert wait_until(lambda: all(file.exists() for file in files), 90)
            begin = time.monotonic()
            hosts.crash("h2")
            _, err = launcher.communicate(timeout=90)
            assert launcher.returncode == 1, err
            assert "host h2 was lost" in err
            assert "(ranks 2-3 ran there)" in err
            assert time.monotonic() - begin < 60
            for name in ("h1", "h3"):

                def is_empty(name: str = name) -> bool:
                    return not any("script.py" in " ".join(each.cmdline()) for each in hosts.processes(name))

                assert wait_until(is_empty, 60)
        finally:
            launcher.terminate()
            hosts.restart("h2")
            cluster.start_node("h2")
