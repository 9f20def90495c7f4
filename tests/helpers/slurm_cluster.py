"""A Slurm cluster for tests: munged, slurmctld and slurmd of this machine, with ports and a folder of their own.

Nothing in /etc is read or written, and no other cluster is disturbed. It needs root, and Debian's packages slurm-wlm
and munge; `why_not` says what is missing. The nodes are this machine itself, or hosts of `ssh_hosts`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from ssh_hosts import SshHosts

_MUNGED = "/usr/sbin/munged"
_START_SEC = 60.0
_END_SEC = 20.0
_CONFIG = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=2
SlurmdTimeout=5
TreeWidth=16
SlurmdParameters=config_overrides
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def why_not() -> str:
    """Return why such a cluster cannot be made here; "" if it can."""
    if os.geteuid() != 0:
        return "a cluster of one's own needs root"
    missing = [tool for tool in ("slurmctld", "slurmd", "srun", _MUNGED) if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return ""


class SlurmCluster:
    """A running cluster. A context manager; leaving it cancels every job and ends every process of it.

    Args:
        hosts: the machines whose namespaces are the nodes; None: this machine is the only one.
        cpus: that every node claims to have.

    Attributes:
        nodes: names of the nodes.
        env: the environment in which `srun` and the rest find this cluster, and no other.
    """

    def __init__(self, hosts: SshHosts | None = None, *, cpus: int = 4) -> None:
        self._hosts = hosts
        self._cpus = cpus
        self._folder = Path(tempfile.mkdtemp(prefix="unidist-slurm-"))
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.nodes = hosts.names if hosts is not None else (socket.gethostname().partition(".")[0],)
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
        self.env = {**outer, "SLURM_CONF": str(self._folder / "slurm.conf")}

    def run(self, *command: str, timeout: float = 60, check: bool = True) -> str:
        """Run a command of Slurm and return what it wrote on standard output."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
        return done.stdout

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that wait, run or are ending."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def steps(self) -> list[psutil.Process]:
        """Return the processes by which the nodes run steps of jobs, and what these have started."""
        found = []
        for process in psutil.process_iter():
            try:
                is_step = process.name() == "slurmstepd" and process.status() != psutil.STATUS_ZOMBIE
                # It has cleared its environment, but writes to the log of the slurmd that started it.
                if is_step and any(file.path.startswith(f"{self._folder}/") for file in process.open_files()):
                    found += [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
        return found

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _build(self) -> None:
        self._folder.chmod(0o755)
        munge = self._folder / "munge"
        munge.mkdir()
        (self._folder / "state").mkdir()
        key = munge / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        address = "127.0.0.1" if self._hosts is None else self._hosts.gateway
        config = _CONFIG.format(
            controller=socket.gethostname().partition(".")[0],
            address=address,
            folder=self._folder,
            controller_port=_free_port(address),
            node_port=_free_port(address),
        )
        addresses = ("127.0.0.1",) if self._hosts is None else self._hosts.addresses
        for name, each in zip(self.nodes, addresses, strict=True):
            config += f"NodeName={name} NodeAddr={each} CPUs={self._cpus} State=UNKNOWN\n"
        (self._folder / "slurm.conf").write_text(config)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        self._start(_MUNGED, "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items()))
        self._await("munged", lambda: (munge / "socket").exists())
        conf = self.env["SLURM_CONF"]
        self._start("slurmctld", "-D", "-f", conf, "-c")
        for name in self.nodes:
            self.start_node(name)
        self._await("the nodes", self._is_idle)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd; also again, after its host has crashed and is back."""
        command = ("slurmd", "-D", "-f", self.env["SLURM_CONF"], "-c", "-N", name)
        if self._hosts is None:
            self._start(*command)
        else:
            line = f"exec env SLURM_CONF={self.env['SLURM_CONF']} {' '.join(command)}"
            self._start(*self._hosts.ssh_command.split(), name, line)

    def wait_idle(self, seconds: float = _END_SEC) -> None:
        """Wait until every node waits for jobs."""
        self._await("the nodes", self._is_idle, seconds)

    def _is_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=self.env, capture_output=True, text=True, timeout=30
        )
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def _start(self, *command: str) -> None:
        log = self._folder / f"{len(self._daemons)}.out"
        with log.open("wb") as file:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            )

    def _await(self, what: str, condition: Callable[[], bool], seconds: float = _START_SEC) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = [
                    f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self._folder.glob("*.*") if log.is_file()
                ]
                raise AssertionError(f"{what} did not come in {seconds} seconds\n" + "\n".join(logs))
            time.sleep(0.02)

    def _remove(self) -> None:
        if (self._folder / "slurm.conf").exists() and len(self._daemons) > 1:
            subprocess.run(["scancel", "--user=root"], env=self.env, capture_output=True, timeout=30)
            deadline = time.monotonic() + _END_SEC
            while self.steps() and time.monotonic() < deadline:
                time.sleep(0.05)
        for process in self.steps():
            process.kill()
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
