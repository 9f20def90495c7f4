"""Elastic jobs on the nodes of a real Slurm: ranks and nodes that are lost, and an allocation that comes to its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from elastic_job import ElasticJob, script, total
from slurm_cluster import SlurmCluster
from slurm_cluster import why_not as why_no_slurm
from ssh_hosts import SshHosts
from ssh_hosts import why_not as why_no_hosts
from unidist_command import Command

from unidist.checkpoint.format import directory

WHY_NOT = why_no_hosts() or why_no_slurm()
pytestmark = [pytest.mark.soak, pytest.mark.parallel, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "none")]


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: SshHosts) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts) as made:
        yield made


def start(cluster: SlurmCluster, command: Command, *options: str, num_proc: int = 3) -> ElasticJob:
    """Start a job of a rank on each of three nodes, or fewer, from outside of them, as from a login node."""
    events = command.folder / "events.jsonl"
    name = command.script(script(setup="import unidist_torch.engines.gloo"))  # so that nobody waits for a latecomer
    # Without --no-kill Slurm ends the whole job when a node fails.
    salloc = ("salloc", "--quiet", "--no-kill", "--nodes", "3", "--ntasks-per-node", "1")
    launch = (sys.executable, "-m", "unidist_launch", "launch", "-np", str(num_proc), "--min-np", "1", *options)
    words = [*salloc, *launch, "--event-log", str(events), sys.executable, name, "1000000", "0.05"]
    env = {**cluster.env, "UNIDIST_HEARTBEAT_SEC": "3"}
    return ElasticJob(command.start_words(words, env=env), events)


def test_a_rank_and_a_node_that_are_lost_leave_the_job_going(
    cluster: SlurmCluster, hosts: SshHosts, command: Command
) -> None:
    with start(cluster, command) as job:
        job.pid(2, 3)
        job.wait_for(r"step 5 .*")
        (victim,) = [each for each in hosts.processes("h2") if "script.py" in each.cmdline()]
        victim.kill()
        assert command.wait_until(lambda: sizes(job) == [3, 2, 3], 120), job.lines
        (agent,) = [each for each in hosts.processes("h3") if each.cmdline()[-1:] == ["unidist_launch.agent.agent"]]
        os.kill(agent.pid, signal.SIGKILL)
        assert command.wait_until(lambda: sizes(job) == [3, 2, 3, 2, 3], 120), job.lines
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert command.wait_until(lambda: not cluster.steps(), 30)


def test_an_allocation_that_comes_to_its_end_loses_no_step(cluster: SlurmCluster, command: Command) -> None:
    with start(cluster, command, "--checkpoint-dir", "run", "--checkpoint-interval", "3600") as job:
        job.wait_for(r"step 5 .*")
        (number,) = cluster.jobs()
        cluster.run("scancel", "--signal=TERM", number)  # as at the time limit, seconds before Slurm kills
        assert job.end() == 128 + signal.SIGTERM, job.lines
    reached = max(int(step) for (step,) in job.said(r"step (\d+) .*"))
    assert directory.steps(command.folder / "run")[-1][0] in (reached, reached + 1)
    with start(cluster, command, "--checkpoint-dir", "run") as job:
        (again,) = job.wait_for(r"enter 0 3 (\d+) .*")
        assert int(again) >= reached
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}


def test_nobody_waits_for_a_spare_node_of_an_allocation_that_is_taken_back(
    cluster: SlurmCluster, command: Command
) -> None:
    with start(cluster, command, num_proc=2) as job:
        job.wait_for(r"step 5 .*")
        assert len(job.events("host_joined")) == 2
        (number,) = cluster.jobs()
        cluster.run("scancel", "--signal=TERM", number)
        assert job.end(seconds=60) == 128 + signal.SIGTERM, job.lines
        assert len(job.events("host_joined")) == 2


def sizes(job: ElasticJob) -> list[int]:
    return [event["world_size"] for event in job.events("generation")]
