"""The engine tcp between hosts with poor networks: short packets, slow links that lose what does not fit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ssh_hosts
from ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not() or "hosts can be made"),
]

SCRIPT = """
from unidist.runtime import context
from unidist.testing.cases import message, stress

world = context.init().world
assert "tcp" in world.description, world.description
for seed in range({seeds}):
    stress.random_program(world, seed, 60)
message.messages_keep_their_order(world)
print("right", flush=True)
context.shutdown()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        for name in made.names:
            made.narrow(name, mtu=576, rate="60mbit")
        yield made


def check(hosts: SshHosts, folder: Path, num_ranks: int, *, seeds: int, env: tuple[str, ...] = ()) -> None:
    (folder / "script.py").write_text(SCRIPT.format(seeds=seeds))
    first = (num_ranks + 1) // 2
    where = ("-np", str(num_ranks), "-H", f"h1:{first},h2:{first}", "--ssh-command", hosts.ssh_command)
    variables = [item for each in ("UNIDIST_TIMEOUT_SEC=120", *env) for item in ("--env", each)]
    command = [sys.executable, "-m", "unidist_launch", "launch", *where, *variables, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") >= 1, done.stdout


def test_random_programs_between_two_hosts_with_short_packets(hosts: SshHosts, tmp_path: Path) -> None:
    check(hosts, tmp_path, 2, seeds=1)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "env", [(), ("UNIDIST_HIERARCHICAL=0",), ("UNIDIST_HIERARCHICAL=0", "UNIDIST_TCP_CONNECTIONS=5")]
)
def test_random_programs_with_short_packets(
    hosts: SshHosts, tmp_path: Path, num_ranks: int, env: tuple[str, ...]
) -> None:
    check(hosts, tmp_path, num_ranks, seeds=3, env=env)
