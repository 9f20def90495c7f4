"""Elastic jobs in the pods of a JobSet, which are killed and replaced while the job runs."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from elastic_job import ElasticJob, script, total
from kubernetes_pods import ClusterPod, pods_of
from ssh_hosts import SshHosts
from ssh_hosts import why_not as why_no_hosts
from unidist_command import Command

from unidist_kubernetes.elastic import Reception
from unidist_kubernetes.kinds import objects
from unidist_kubernetes.manifest import JobKind, Manifest
from unidist_kubernetes.messages import PodHere

Start = Callable[[int, list[str], dict[str, str]], "subprocess.Popen[str]"]


class JobSet:
    """The pods of an elastic JobSet: pod 0 has the launcher. A context manager, which ends them.

    Args:
        command: for the folder of the job, which every pod sees.
        start: starts the command of a pod, by index.
        leader: replaces the launcher's name where no DNS knows it.
    """

    def __init__(self, command: Command, start: Start, leader: str = "", arguments: tuple[str, ...] = ()) -> None:
        self._command = command
        self._start = start
        self._leader = leader
        self._stack = ExitStack()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._secret = command.folder / "secret"
        self._secret.write_text("0123456789abcdef" * 4)
        name = command.script(script())
        options = ("-np", "2", "--min-np", "1", "--event-log", "events", *arguments)
        self._arguments = (*options, sys.executable, name, "1000000", "0.05")
        self.pods: list[subprocess.Popen[str]] = []

    def pod(self, index: int) -> ClusterPod:
        """Return a pod as Kubernetes makes it, each time by another name."""
        wanted = Manifest(
            JobKind.JOBSET, "train", "i", 2, 1, self._arguments, port=self._port, python=sys.executable, folder="/"
        )
        found = pods_of(objects(wanted))
        env = dict(found[index].env)
        if self._leader:
            env["UNIDIST_POD_LEADER"] = env["UNIDIST_POD_LEADER"].replace(found[0].dns, self._leader)
        env |= {"UNIDIST_POD_SECRET_FILE": str(self._secret), "UNIDIST_HEARTBEAT_SEC": "3"}
        return ClusterPod(found[index].dns, found[index].words, env)

    def start(self, index: int) -> subprocess.Popen[str]:
        """Start a pod, or another in its place."""
        pod = self.pod(index)
        process = self._stack.enter_context(self._start(index, pod.words, pod.env))
        self._stack.callback(process.kill)
        return process

    def job(self) -> ElasticJob:
        """Start the launcher's pod."""
        job = ElasticJob(self.start(0), self._command.folder / "events")
        return self._stack.enter_context(job)

    def __enter__(self) -> JobSet:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@pytest.fixture
def jobset(command: Command) -> Iterator[JobSet]:
    def start(index: int, words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        return command.start(*words[3:], env=env)

    with JobSet(command, start, "localhost") as made:
        yield made


def sizes(job: ElasticJob) -> list[int]:
    return [len(event["workers"]) for event in job.events("generation")]


def test_a_pod_that_is_killed_is_replaced_and_no_step_is_lost(jobset: JobSet, command: Command) -> None:
    job = jobset.job()
    first, second = jobset.start(1), jobset.start(2)
    job.pid(1, 2)
    job.wait_for(r"step 3 .*")
    second.kill()
    assert command.wait_until(lambda: sizes(job) == [2, 1], 60), job.lines
    another = jobset.start(2)
    assert command.wait_until(lambda: sizes(job) == [2, 1, 2], 60), job.lines
    lost, joined = job.events("host_lost"), job.events("host_joined")
    assert len({each["host"] for each in joined}) == 3, "no two pods have the same name"
    assert [each["host"] for each in lost] == [joined[i]["host"] for i in (0, 1) if "0-1-" in joined[i]["host"]]
    (command.folder / "stop").touch()
    assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    for pod in (first, another):
        assert pod.wait(30) == 0


@pytest.mark.soak
def test_a_pod_that_is_taken_back_has_its_rank_leave_and_is_replaced(jobset: JobSet, command: Command) -> None:
    job = jobset.job()
    _, second = jobset.start(1), jobset.start(2)
    job.pid(1, 2)
    second.send_signal(signal.SIGTERM)  # as the kubelet does, half a minute before SIGKILL
    assert command.wait_until(lambda: sizes(job) == [2, 1], 60), job.lines
    assert not job.events("host_lost")
    jobset.start(2)  # Kubernetes does not wait for the end of the old one
    assert command.wait_until(lambda: sizes(job) == [2, 1, 2], 60), job.lines
    second.kill()
    (command.folder / "stop").touch()
    assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}


def test_pods_end_when_their_launcher_has_gone_and_when_kubernetes_wants_them_back(
    jobset: JobSet, command: Command
) -> None:
    waiting = jobset.start(1)  # there is no launcher yet
    job = jobset.job()
    assert command.wait_until(lambda: len(job.events("host_joined")) == 1, 60), job.lines
    job.process.kill()
    assert waiting.poll() is None
    waiting.terminate()
    assert waiting.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-np", "2"], "these pods come and go (UNIDIST_POD_ROLE=launcher), but the job is not elastic"),
        (["-np", "1", "--min-np", "1", "--state-dir", "state"], "leave --state-dir out"),
    ],
)
def test_what_an_elastic_jobset_cannot_do_is_told_in_a_line(
    jobset: JobSet, command: Command, options: list[str], message: str
) -> None:
    done = command.run_here("launch", *options, "script.py", env=jobset.pod(0).env)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_pods_of_a_fixed_job_refuse_an_elastic_one(command: Command, tmp_path: Path) -> None:
    name = command.script("pass")
    (tmp_path / "secret").write_text("x" * 16)
    (pod, *_) = pods_of(objects(Manifest(JobKind.JOB, "train", "i", 2, 1, (name,))))
    env = {**pod.env, "UNIDIST_POD_SECRET_FILE": str(tmp_path / "secret")}
    done = command.run("launch", "-np", "2", "--min-np", "1", name, env=env)
    assert done.returncode == 2
    assert "the pods of this job are fixed" in done.stderr


def test_a_pod_that_connects_again_takes_the_place_of_its_old_connection() -> None:
    reception = Reception()
    hello = PodHere("train-workers-0-0-abcde", 2)
    (first,) = reception.received(1, hello, 0.0)
    drop, second = reception.received(2, hello, 0.0)
    assert first == second
    assert (drop.peer, "connected again" in drop.reason) == (1, True)  # type: ignore[union-attr]
    assert list(reception.lost(1, "late", 0.0)) == []
    (order,) = reception.order("train-workers-0-0-abcde", "x")
    assert order.peer == 2  # type: ignore[union-attr]
    assert len(list(reception.lost(2, "gone", 0.0))) == 1


@pytest.mark.soak
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "none")
def test_a_node_that_crashes_leaves_the_job_going(command: Command) -> None:
    """The launcher and one pod on a node, another pod on the other: that node crashes and comes back."""
    with SshHosts(2) as hosts:

        def start(index: int, words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
            assigned = [f"{key}={value}" for key, value in env.items()]
            line = f"cd {shlex.quote(str(command.folder))} && exec env {shlex.join([*assigned, *words])}"
            where = hosts.names[1 if index == 2 else 0]
            return subprocess.Popen(
                [*hosts.ssh_command.split(), where, line],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

        with JobSet(command, start) as jobset:
            hosts.alias(hosts.names[0], jobset.pod(0).dns)
            job = jobset.job()
            jobset.start(1)
            jobset.start(2)
            job.pid(1, 2)
            hosts.crash(hosts.names[1])
            assert command.wait_until(lambda: sizes(job) == [2, 1], 60), job.lines
            hosts.restart(hosts.names[1])
            jobset.start(2)
            assert command.wait_until(lambda: sizes(job) == [2, 1, 2], 60), job.lines
            (command.folder / "stop").touch()
            assert job.end() == 0, job.lines
            (steps,) = job.steps()
            assert job.totals() == {total(steps)}
