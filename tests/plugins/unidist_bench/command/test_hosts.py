"""`unidist bench` over real ssh, between hosts that are network namespaces."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import psutil
import pytest
from ssh_hosts import SshHosts, why_not
from unidist_command import Command

from unidist_bench import read

pytestmark = [pytest.mark.parallel, pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")]


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        yield made


def bridge_of(hosts: SshHosts) -> str:
    """Return the interface by which this host reaches the others."""
    addresses = psutil.net_if_addrs().items()
    return next(name for name, items in addresses if any(item.address == hosts.gateway for item in items))


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["gloo", "mpi"])
def test_ranks_of_two_hosts_are_measured_and_the_results_come_to_the_command(
    command: Command, hosts: SshHosts, peer: str
) -> None:
    package = {"gloo": "torch", "mpi": "mpi4py"}[peer]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    interfaces = f"{bridge_of(hosts)},eth0"  # of this host, whose names only ssh knows, and of those
    place = ("-np", "2", "-H", "h1:1,h2:1", "--ssh-command", hosts.ssh_command, "--network-interface", interfaces)
    sizes = ("-b", "8", "-e", "64K", "-f", "8192", "--iterations", "3")
    done = command.run("bench", "allreduce", "sendrecv", *place, *sizes, "--beside", peer, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = read(command.folder / "out.json")
    assert len(set(found.hosts)) == 2
    assert [len(one.rows) for one in found.series] == [2, 2]
    assert found.num_wrong == 0
    assert not hosts.processes("h1")
    assert not hosts.processes("h2")
