"""Pods as processes of this machine, with the manifest's commands and the variables that operators set."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kubernetes_pods import pods_of
from rank_lines import rank_lines
from ssh_hosts import SshHosts
from ssh_hosts import why_not as why_no_hosts
from unidist_command import Command

from unidist_kubernetes.kinds import objects
from unidist_kubernetes.manifest import JobKind, Manifest

FIXED = [kind for kind in JobKind if kind is not JobKind.MPIJOB]
"""Kinds whose pods meet by themselves; those of an MPIJob are hosts that are reached by ssh."""


class Pods:
    """The pods of a manifest, as processes: each with the manifest's command and variables, and an index."""

    def __init__(self, command: Command, leader: str | None = "localhost") -> None:
        self.command = command
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.secret = command.folder / "secret"
        self.secret.write_text("0123456789abcdef" * 4 + "\n")
        self.leader = leader

    def variables(
        self, index: int, *arguments: str, kind: JobKind = JobKind.JOB, **changes: Any
    ) -> tuple[list[str], dict[str, str]]:
        port = {} if kind is JobKind.TRAINJOB else {"port": self.port}
        wanted = {"num_pods": 2, "slots": 2, "arguments": arguments, "python": sys.executable, **port, **changes}
        pods = pods_of(objects(Manifest(kind=kind, name="train", image="i", **wanted)))
        env = pods[index].env
        if self.leader is not None:  # where no DNS does it
            env = {name: text.replace(pods[0].dns, self.leader) for name, text in env.items()}
        if kind is JobKind.TRAINJOB:
            env["PET_MASTER_PORT"] = str(self.port)  # that of another job, on this machine
        return pods[index].words, {**env, "UNIDIST_POD_SECRET_FILE": str(self.secret)}  # mounted by the kubelet

    def start(
        self,
        index: int,
        *arguments: str,
        env: dict[str, str] | None = None,
        kind: JobKind = JobKind.JOB,
        **changes: Any,
    ) -> subprocess.Popen[str]:
        command, own = self.variables(index, *arguments, kind=kind, **changes)
        assert command[1:3] == ["-m", "unidist_launch"]
        return self.command.start(*command[3:], env={**own, **(env or {})})


@pytest.fixture
def pods(command: Command) -> Pods:
    return Pods(command)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        try:
            out, err = process.communicate(timeout=120)
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, err


@pytest.mark.parametrize("kind", [JobKind.JOB, JobKind.TRAINJOB, JobKind.TFJOB, JobKind.VOLCANO])
def test_pods_meet_and_their_ranks_know_their_place(pods: Pods, kind: JobKind) -> None:
    script = pods.command.script("""
        env = os.environ
        print(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["UNIDIST_NODE_RANK"], env["UNIDIST_STRATEGY"])
        secret = bytes(os.pread(int(env["UNIDIST_SECRET_FD"]), 100, 0))
        assert secret == b"0123456789abcdef" * 4
    """)
    arguments = ("--strategy", "accumulate=2", script)
    second = pods.start(1, *arguments, kind=kind)  # it waits for the first
    code, out, err = ended(pods.start(0, *arguments, kind=kind))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} 4 {rank % 2} {rank // 2} accumulate=2" for rank in range(4)]
    assert ended(second)[0] == 0


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG does not say which pods there are: it is no JSON"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "a"}, "a TrainJob with 2 pods, which have no"),
    ],
)
def test_a_pod_that_cannot_read_its_place_does_not_train_alone(
    command: Command, env: dict[str, str], message: str
) -> None:
    done = command.run_here("launch", command.script("open('ran', 'w')"), env=env)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (command.folder / "ran").exists()


def test_servers_and_evaluators_of_a_tfjob(pods: Pods) -> None:
    script = pods.command.script("""
        if os.environ.get("UNIDIST_ROLE") == "evaluator":
            assert "RANK" not in os.environ
            open("evaluating", "w").close()
            print("evaluating", flush=True)
            time.sleep(300)
        while not os.path.exists("evaluating"):
            time.sleep(0.05)
        print("values", bool(os.environ["UNIDIST_JOB_VALUES"]))
    """)
    cluster = {role: [f"localhost:{pods.port}"] for role in ("chief", "worker", "ps")}

    def start(role: str) -> subprocess.Popen[str]:
        config = json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
        env = {"TF_CONFIG": config, "UNIDIST_POD_SLOTS": "1", "UNIDIST_POD_SECRET_FILE": str(pods.secret)}
        options = ("-v", "--strategy", "parameter_server=async:servers=1", "--env", "UNIDIST_VERIFY=off")
        return pods.command.start("launch", *options, script, env=env)

    others = [start(role) for role in ("ps", "evaluator", "worker")]
    code, out, err = ended(start("chief"))
    assert code == 0, err
    assert rank_lines(out) == {rank: ["values True"] for rank in range(2)}
    assert err.count(": started its agent") == 1  # though all pods have one name here
    assert "unidist: ps 0 is process" in err
    assert "[evaluator 0] evaluating" in err
    assert [ended(other)[0] for other in others] == [0, 0, 0]


def test_pods_for_servers_that_no_strategy_has(pods: Pods) -> None:
    cluster = {"worker": [f"localhost:{pods.port}"], "ps": ["localhost:1"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    env = {"TF_CONFIG": config, "UNIDIST_POD_SLOTS": "1", "UNIDIST_POD_SECRET_FILE": str(pods.secret)}
    done = pods.command.run("launch", pods.command.script(""), env=env)
    assert done.returncode == 2
    assert "has 1 pods of the type PS, and no strategy of this job has parameter servers" in done.stderr


def test_the_evaluator_runs_in_the_pod_that_is_named(pods: Pods) -> None:
    evaluate = pods.command.script(
        """
        open("evaluating", "w").write(os.environ["UNIDIST_ROLE"] + os.environ["UNIDIST_POD_SLOTS"])
    """,
        "evaluate.py",
    )
    script = pods.command.script("while not os.path.exists('evaluating'): time.sleep(0.05)", "train.py")
    arguments = ("--evaluator", evaluate, "--evaluator-host", "1", script)
    second = pods.start(1, *arguments)
    code, _, err = ended(pods.start(0, *arguments))
    assert code == 0, err
    assert (pods.command.folder / "evaluating").read_text() == "evaluator2"
    assert ended(second)[0] == 0


def test_the_first_pod_tells_of_a_failure_in_another(pods: Pods) -> None:
    script = pods.command.script("sys.exit(7) if rank == 3 else time.sleep(60)")
    second = pods.start(1, script)
    code, _, err = ended(pods.start(0, script))
    assert code == 7
    assert "unidist: rank 3 failed first (host pod-1, pid " in err
    assert ended(second)[0] == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_nothing_is_left_after_kill_9_of_a_pod(pods: Pods, victim: int) -> None:
    script = pods.command.script("open(f'ready{rank}', 'w'); time.sleep(300)")
    with ExitStack() as stack:
        running = [stack.enter_context(pods.start(index, "--grace-period", "1", script)) for index in range(2)]
        stack.callback(lambda: [each.kill() for each in running])
        files = [pods.command.folder / f"ready{rank}" for rank in range(4)]
        assert pods.command.wait_until(lambda: all(file.exists() for file in files), 60)
        running[victim].kill()
        _, err = running[1 - victim].communicate(timeout=60)
        assert running[1 - victim].returncode in (1, 2)
    assert ("host pod-1 was lost" if victim else "pod 1 has lost the first pod, localhost") in err
    assert pods.command.wait_until(lambda: not pods.command.alive(), 60)


def test_pods_that_cannot_meet_say_why(pods: Pods, tmp_path: Path) -> None:
    script = pods.command.script("open('ran', 'w')")
    code, _, err = ended(pods.start(1, "--start-timeout", "0.5", script))
    assert code == 2
    assert f"pod 1 cannot reach the first pod, localhost:{pods.port}, in 0.5 seconds" in err
    assert "is there the headless Service" in err
    other = tmp_path / "other_secret"
    other.write_text("fedcba9876543210")
    second = pods.start(1, "--start-timeout", "60", script, env={"UNIDIST_POD_SECRET_FILE": str(other)})
    code, _, err = ended(pods.start(0, "--start-timeout", "5", script))  # in which the other one has to come
    assert code == 2
    assert "no answer from pod-1 in 5 seconds" in err
    code, _, err = ended(second)
    assert code == 2
    assert "the same Secret" in err
    assert not (pods.command.folder / "ran").exists()


@pytest.mark.soak
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "none")
@pytest.mark.parametrize("kind", FIXED)
def test_pods_on_hosts_of_their_own(command: Command, kind: JobKind) -> None:
    """Each with an address of its own, and the names that the cluster's DNS would know."""
    script = command.script("print(os.environ['MASTER_ADDR'], os.environ['UNIDIST_HOST_ADDRESS'])")
    pods = Pods(command, leader=None)
    with SshHosts(2) as hosts, ExitStack() as stack:
        running = []
        made = pods_of(objects(Manifest(kind, "train", "i", 2, 1, (script,))))
        for name, each in zip(hosts.names, made, strict=True):
            hosts.alias(name, each.dns)
        for index, name in enumerate(hosts.names):
            words, env = pods.variables(index, script, kind=kind, slots=1)
            assigned = [f"{key}={value}" for key, value in env.items()]
            line = f"cd {shlex.quote(str(command.folder))} && exec env {shlex.join([*assigned, *words])}"
            started = subprocess.Popen(
                [*hosts.ssh_command.split(), name, line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running.append(stack.enter_context(started))
        (code, out, err), second = [ended(each) for each in running]
    assert code == 0, err + second[2]
    first, other = hosts.addresses
    assert sorted(out.splitlines()) == [f"[0] {first} {first}", f"[1] {first} {other}"]
    assert second[0] == 0
