"""The Slurm launcher: inside of an allocation, one srun starts the agents of all nodes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from typing_extensions import override

from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.launcher import ElasticLimits, Host, Job, KnowsHosts, Launcher, RunsElasticJobs, StartsSideProcesses
from unidist_launch.elastic_job.fallback import run_elastic
from unidist_launch.elastic_job.run import ElasticRun
from unidist_launch.options import hosts as host_list
from unidist_launch.remote.hosts import AgentStarter, Reasons, agent_command, meaning_of
from unidist_launch.remote.run import RemoteRun
from unidist_slurm import allocation as slurm_allocation

_PER_TASK = re.compile(
    r"SLURM_(NTASKS.*|NPROCS|TASKS_PER_NODE|CPUS_PER_TASK|TRES_PER_TASK|GPUS_PER_TASK|GPU_BIND|CPU_BIND.*|MEM_BIND.*"
    r"|DISTRIBUTION|EXACT|EXCLUSIVE|OVERCOMMIT|SPREAD_JOB|THREADS_PER_CORE|HINT|KILL_BAD_EXIT|NNODES|WHOLE)"
    r"|SRUN_CPUS_PER_TASK"
)
"""By these, sbatch's options for the ranks would become srun's for the agents, of which each node has one."""

_REASONS: Reasons = (
    (r"Invalid job id|Expired or invalid job|Job.* no longer", "the allocation has ended; get a new one"),
    (
        r"execve\(\).*No such file|No such file or directory",
        f"{sys.executable} does not exist there; every node needs the same environment at the same path",
    ),
    (r"Node failure|NODE FAILURE|DUE TO NODE FAIL", "a node has failed; Slurm's `sinfo` tells which"),
    (r"TIME LIMIT", "the allocation has reached its time limit"),
    (r"Unable to create step|Requested node", "Slurm gives no step there; do other steps of this job use the nodes?"),
    (r"Unable to contact slurm controller|Socket timed out", "Slurm's controller does not answer"),
)
"""What srun writes, and what it means for the user."""


class SlurmLauncher(Launcher, KnowsHosts, RunsElasticJobs, StartsSideProcesses):
    """Runs the ranks of a job on the nodes of the allocation that it is in. In an elastic job they may come and go."""

    def availability(self) -> Availability:
        """Usable on Linux where srun is."""
        if platform.system() != "Linux":
            return Availability(False, f"needs Linux, this is {platform.system()}")
        program = shutil.which("srun")
        if program is None:
            return Availability(False, "no srun on the PATH")
        inside = slurm_allocation.MARKER in os.environ
        return Availability(True, program if inside else f"{program}; inside of an allocation, which this is not")

    @override
    def hosts(self) -> tuple[Host, ...]:
        return slurm_allocation.read(os.environ, slurm_allocation.expand_by_scontrol)

    def run(self, job: Job) -> int:
        """Run the job; see `Launcher.run`. To be called from the main thread, for it handles signals.

        Ranks read nothing on standard input.
        """
        allocated = self.hosts()
        names = [host.name for host in allocated]
        strangers = [host.name for host in job.hosts if host.name not in names]
        if strangers:
            raise ConfigurationError(
                f"host {', '.join(strangers)} is not in this allocation, which has {', '.join(names)}; name these, or "
                "leave -H out."
            )
        if job.elastic is not None:
            return _run_elastic(replace(job, hosts=job.hosts or allocated), job.elastic)
        hosts = host_list.used(job.hosts or allocated, job.num_proc)
        agents = SlurmAgents(hosts)
        with ExitStack() as stack:
            return RemoteRun(job, hosts, [agents] * len(hosts), stack).run()


def _run_elastic(job: Job, limits: ElasticLimits) -> int:
    if limits.discovery_script is not None:
        raise ConfigurationError(
            "an allocation has the nodes that it has; leave --host-discovery-script out, or choose --launcher elastic, "
            "which goes to other hosts by ssh."
        )
    if limits.state_dir is not None:
        raise ConfigurationError(
            "Slurm ends a job's steps with the script that started them, so no launcher can come back to them; leave "
            "--state-dir out. With --checkpoint-dir a job that is queued again goes on."
        )
    agent = SlurmNodeAgent()
    return run_elastic(job, lambda each, stack: ElasticRun(each, stack, starter_of=lambda host: agent))


_OPTIONS = (
    "--overlap",  # other steps of the user's do not keep it waiting
    "--cpu-bind=none",  # the ranks may use all that the job has on the node
    "--mpi=none",
    "--kill-on-bad-exit=1",
    "--input=all",
    "--export=ALL",
    "--job-name=unidist",
    "--unbuffered",
)


class _Srun(AgentStarter):
    """Common base of the ways in which srun starts agents."""

    address_variable = "SLURM_LAUNCH_NODE_IPADDR"
    exports = False  # srun exports the launcher's environment; Slurm adds what belongs to a node, such as its GPUs

    @override
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not _PER_TASK.fullmatch(name)}

    @override
    def explain(self, host: Host, returncode: int, text: str) -> str:
        return meaning_of(host, "srun", returncode, text, _REASONS)


class SlurmNodeAgent(_Srun):
    """Starts the agent of one node by a separate srun, so that a lost agent can be started again."""

    @override
    def command(self, host: Host) -> Sequence[str]:
        return ["srun", "--nodes", "1", "--ntasks", "1", "--nodelist", host.name, *_OPTIONS, *agent_command()]


class SlurmAgents(_Srun):
    """Starts all agents by one srun, a task on each node. srun carries the order to all of them.

    Args:
        hosts: the nodes.
    """

    index_variable = "SLURMD_NODENAME"

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._names = [host.name for host in hosts]
        # By name: Slurm may number the tasks in another order than that of the list.
        self.indices: Mapping[str, int] = {name: index for index, name in enumerate(self._names)}

    @override
    def command(self, host: Host) -> Sequence[str]:
        num_nodes = str(len(self._names))
        return [
            "srun",
            *("--nodes", num_nodes, "--ntasks", num_nodes, "--ntasks-per-node", "1"),
            *("--nodelist", ",".join(self._names)),
            *_OPTIONS,
            *agent_command(),
        ]
