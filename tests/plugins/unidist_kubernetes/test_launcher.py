"""Manifests against the API's schemas, pods as processes of this machine, and discovery by a kubectl that is none.

There is no cluster here. What a cluster does with a manifest (starting the pods, DNS, mounting the Secret) is taken
from its documentation; the processes of the pods themselves run for real, with the manifest's command and variables.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from ssh_hosts import SshHosts
from ssh_hosts import why_not as why_no_hosts
from unidist_command import Command

from unidist.errors import ConfigurationError
from unidist_kubernetes import discovery as kubernetes_discovery
from unidist_kubernetes.launcher import Pod
from unidist_kubernetes.manifest import Kind, Manifest

jsonschema = pytest.importorskip("jsonschema", reason="in the extra `test`")

SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())
USUAL: dict[str, Any] = {
    "kind": Kind.JOB,
    "name": "train",
    "image": "registry.example/train:1",
    "num_pods": 2,
    "slots": 2,
    "arguments": ("train.py",),
}


def check(document: dict[str, Any]) -> None:
    """Raise unless a document has the form that the API takes."""
    schema = {"$ref": f"#/$defs/{document['kind']}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(document)


def manifest(**changes: Any) -> list[dict[str, Any]]:
    return Manifest(**{**USUAL, **changes}).objects()


def containers(document: Any) -> Iterator[dict[str, Any]]:
    """Yield every container of a document."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if key == "containers":
            yield from value
        elif isinstance(value, dict | list):
            yield from containers(value)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "namespace": "team",
            "gpus": 8,
            "cpus": "32",
            "memory": "512Gi",
            "shared_memory": "64Gi",
            "folder": "/work",
            "env": {"NCCL_DEBUG": "INFO"},
        },
    ],
    ids=["plain", "all"],
)
def test_manifests_have_the_form_that_the_api_takes(kind: Kind, changes: dict[str, Any]) -> None:
    documents = manifest(kind=kind, **changes)
    for document in documents:
        check(document)
    assert yaml.safe_load("".join(yaml.safe_dump(document) for document in documents[-1:])) == documents[-1]
    assert [document["kind"] for document in documents] == {
        Kind.JOB: ["Service", "Job"],
        Kind.JOBSET: ["JobSet"],
        Kind.MPIJOB: ["MPIJob"],
    }[kind]
    volumes = re.findall(r"'name': '(unidist-secret|shared-memory)'", str(documents))
    assert len(volumes) == 2 * len(set(volumes)), "every mount has its volume"


@pytest.mark.parametrize(
    "damage",
    [
        lambda spec: spec.update(completionmode="Indexed"),
        lambda spec: spec.update(completions="2"),
        lambda spec: spec["template"]["spec"].pop("restartPolicy"),
        lambda spec: spec["template"]["spec"]["containers"][0].update(mounts=[]),
        lambda spec: spec["template"]["spec"]["containers"][0]["env"].append({"name": "A", "value": 1}),
    ],
)
def test_the_schema_finds_what_the_api_would_refuse(damage: Any) -> None:
    job = manifest()[-1]
    check(job)
    damage(job["spec"])
    with pytest.raises(jsonschema.ValidationError):
        check(job)


def test_pods_find_the_first_by_the_name_that_kubernetes_gives_it() -> None:
    service, job = manifest()
    spec = job["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    (container,) = containers(job)
    assert {"name": "UNIDIST_POD_LEADER", "value": "train-0.train:29400"} in container["env"]
    (jobset,) = manifest(kind=Kind.JOBSET, max_restarts=3)
    (container,) = containers(jobset)
    assert {"name": "UNIDIST_POD_LEADER", "value": "train-workers-0-0.train:29400"} in container["env"]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    launcher, worker = containers(manifest(kind=Kind.MPIJOB, arguments=("--strategy", "zero=2", "train.py"))[0])
    assert launcher["command"][3:9] == ["launch", "--hostfile", "/etc/mpi/hostfile", "-np", "4", "--strategy"]
    assert worker["command"] == ["/usr/sbin/sshd", "-De"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Train"}, "--name 'Train': small letters"),
        ({"name": "x" * 62}, "at most 63 characters"),
        ({"memory": "64 GB"}, "--memory '64 GB': Kubernetes takes quantities"),
        ({"max_restarts": 1}, "--max-restarts needs --kind jobset"),
        ({"kind": Kind.MPIJOB, "secret": "mine"}, "--secret has no effect on an MPIJob"),
    ],
)
def test_what_cannot_stand_in_a_manifest_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        manifest(**changes)


def test_the_command_prints_what_kubectl_takes(command: Command) -> None:
    options = ("kubernetes", "manifest", "--name", "train", "--image", "i", "--slots-per-node", "2", "--secret", "mine")
    done = command.run(*options, "--env", "A=b=c", "--", "--strategy", "accumulate=2", "train.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert "#   kubectl create secret generic mine --from-file=secret" in done.stdout
    documents = list(yaml.safe_load_all(done.stdout))
    for document in documents:
        check(document)
    (container,) = containers(documents[-1])
    assert {"name": "A", "value": "b=c"} in container["env"]
    assert container["command"][3:] == ["launch", "--strategy", "accumulate=2", "train.py", "--lr", "1"]
    assert {"secretName": "mine", "defaultMode": 0o400} in [
        volume.get("secret") for volume in documents[-1]["spec"]["template"]["spec"]["volumes"]
    ]
    done = command.run(*options, "--", "--stratgy", "zero=2", "train.py")
    assert done.returncode == 2
    assert "Did you mean" in done.stderr


class Pods:
    """The pods of a manifest, as processes: each with the manifest's command and variables, and an index."""

    def __init__(self, command: Command, leader: str = "localhost") -> None:
        self.command = command
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.secret = command.folder / "secret"
        self.secret.write_text("0123456789abcdef" * 4 + "\n")
        self.leader = leader

    def variables(self, index: int, *arguments: str) -> tuple[list[str], dict[str, str]]:
        job = manifest(arguments=arguments, port=self.port, python=sys.executable)[-1]
        (container,) = containers(job)
        env = {each["name"]: each["value"] for each in container["env"]}
        env["UNIDIST_POD_LEADER"] = env["UNIDIST_POD_LEADER"].replace("train-0.train", self.leader)  # done by DNS
        env["UNIDIST_POD_SECRET_FILE"] = str(self.secret)  # mounted by the kubelet
        return container["command"], {**env, "JOB_COMPLETION_INDEX": str(index)}

    def start(self, index: int, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command, own = self.variables(index, *arguments)
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


def test_pods_meet_and_their_ranks_know_their_place(pods: Pods) -> None:
    script = pods.command.script("""
        env = os.environ
        print(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["UNIDIST_NODE_RANK"], env["UNIDIST_STRATEGY"])
        secret = bytes(os.pread(int(env["UNIDIST_SECRET_FD"]), 100, 0))
        assert secret == b"0123456789abcdef" * 4
    """)
    arguments = ("--strategy", "accumulate=2", script)
    second = pods.start(1, *arguments)  # it waits for the first
    code, out, err = ended(pods.start(0, *arguments))
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} 4 {rank % 2} {rank // 2} accumulate=2" for rank in range(4)]
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
    assert pods.command.wait_until(lambda: not pods.command.alive(), 10)


def test_pods_that_cannot_meet_say_why(pods: Pods, tmp_path: Path) -> None:
    script = pods.command.script("open('ran', 'w')")
    code, _, err = ended(pods.start(1, "--start-timeout", "0.5", script))
    assert code == 2
    assert f"pod 1 cannot reach the first pod, localhost:{pods.port}, in 0.5 seconds" in err
    assert "is there the headless Service" in err
    other = tmp_path / "other_secret"
    other.write_text("fedcba9876543210")
    second = pods.start(1, "--start-timeout", "3", script, env={"UNIDIST_POD_SECRET_FILE": str(other)})
    code, _, err = ended(pods.start(0, "--start-timeout", "2", script))
    assert code == 2
    assert "no answer from pod-1 in 2 seconds" in err
    code, _, err = ended(second)
    assert code == 2
    assert "the same Secret" in err
    assert not (pods.command.folder / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"UNIDIST_POD_LEADER": None}, "in the pods of a job, and this is none"),
        ({"UNIDIST_POD_LEADER": "train-0"}, "is not HOST:PORT"),
        ({"JOB_COMPLETION_INDEX": None}, "JOB_COMPLETION_INDEX='' is not a whole number; the Job needs completionMode"),
        ({"JOB_COMPLETION_INDEX": "2"}, "the index is below the number of pods"),
        ({"UNIDIST_POD_SECRET_FILE": "/no/such/file"}, "is the Secret mounted there"),
        ({"UNIDIST_POD_SECRET_FILE": "short"}, "holds 5 bytes; a secret has at least 16"),
    ],
)
def test_a_pod_whose_variables_cannot_be_says_which(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    (tmp_path / "secret").write_text("x" * 16)
    (tmp_path / "short").write_text("short")
    env: dict[str, str | None] = {
        "UNIDIST_POD_LEADER": "train-0.train:1",
        "UNIDIST_PODS": "2",
        "UNIDIST_POD_SLOTS": "4",
        "JOB_COMPLETION_INDEX": "1",
        "UNIDIST_POD_SECRET_FILE": str(tmp_path / "secret"),
        **changes,
    }
    if env["UNIDIST_POD_SECRET_FILE"] == "short":
        env["UNIDIST_POD_SECRET_FILE"] = str(tmp_path / "short")
    with pytest.raises(ConfigurationError, match=message):
        Pod.read({name: value for name, value in env.items() if value is not None})


def test_pods_are_named_as_kubernetes_names_them() -> None:
    assert Pod(1, 2, 1, "train-0.train", 1, b"").name_of(12) == "train-12"


def pod(name: str, **changes: Any) -> dict[str, Any]:
    """A pod as kubectl prints it, cut down to what tells pods apart."""
    found: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{name}-x7k2p", "labels": {"job-name": "train"}, **changes.get("metadata", {})},
        "spec": {
            "hostname": name,
            "subdomain": "train",
            "containers": [{"name": "unidist", "image": "i", "resources": changes.get("resources", {})}],
        },
        "status": {
            "phase": "Running",
            "podIP": f"10.244.1.{10 + int(name[-1])}",
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}],
            **changes.get("status", {}),
        },
    }
    return found


LISTED = {
    "apiVersion": "v1",
    "kind": "List",
    "items": [
        pod("train-1", resources={"limits": {"nvidia.com/gpu": "4"}}),
        pod("train-0", resources={"limits": {"nvidia.com/gpu": "8"}}),
        pod("train-2", status={"phase": "Pending", "podIP": "", "conditions": []}),
        pod("train-3", metadata={"deletionTimestamp": "2026-11-22T10:00:00Z"}),
        pod("train-4", status={"conditions": [{"type": "Ready", "status": "False"}]}),
        pod("train-5"),
    ],
}


def test_ready_pods_are_discovered_with_their_gpus() -> None:
    assert list(kubernetes_discovery.lines(LISTED, slots=None, by_name=False)) == [
        "10.244.1.10:8",
        "10.244.1.11:4",
        "10.244.1.15:1",
    ]
    by_name = list(kubernetes_discovery.lines(LISTED, slots=2, by_name=True))
    assert by_name == ["train-0.train:2", "train-1.train:2", "train-5.train:2"]


def test_discovery_asks_kubectl_and_tells_what_it_says(command: Command, tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    (tmp_path / "pods.json").write_text(json.dumps(LISTED))
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/pods.json\n')
    kubectl.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = command.run("kubernetes", "discover", "-l", "job-name=train", "--namespace", "team", env=path)
    assert (done.returncode, done.stdout) == (0, "10.244.1.10:8\n10.244.1.11:4\n10.244.1.15:1\n"), done.stderr
    asked = "get pods --selector job-name=train --output json --namespace team"
    assert (tmp_path / "asked").read_text().strip() == asked
    (tmp_path / "pods.json").write_text("no json")
    done = command.run("kubernetes", "discover", "-l", "a=b", env=path)
    assert done.returncode == 2
    assert "wrote no list of pods: 'no json'" in done.stderr
    kubectl.write_text("#!/bin/sh\necho 'error: You must be logged in to the server (Unauthorized)' >&2; exit 1\n")
    done = command.run("kubernetes", "discover", "-l", "a=b", env=path)
    assert done.returncode == 2
    assert "ended with exit code 1: error: You must be logged in" in done.stderr
    done = command.run("kubernetes", "discover", "-l", "a=b", "--kubectl", "no-such-kubectl")
    assert done.returncode == 2
    assert "there is no 'no-such-kubectl' on the PATH" in done.stderr


@pytest.mark.soak
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "none")
def test_pods_on_hosts_of_their_own(command: Command) -> None:
    """Each with an address of its own; the first is known to the second by name, as by a headless Service."""
    script = command.script("print(os.environ['MASTER_ADDR'], os.environ['UNIDIST_HOST_ADDRESS'])")
    pods = Pods(command, leader="h1")
    with SshHosts(2) as hosts, ExitStack() as stack:
        running = []
        for index, name in enumerate(hosts.names):
            words, env = pods.variables(index, script)
            assigned = [f"{key}={value}" for key, value in env.items()]
            line = f"cd {shlex.quote(str(command.folder))} && exec env {shlex.join([*assigned, *words])}"
            started = subprocess.Popen(
                [*hosts.ssh_command.split(), name, line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running.append(stack.enter_context(started))
        (code, out, err), second = [ended(each) for each in running]
    assert code == 0, err + second[2]
    first, other = hosts.addresses
    assert sorted(out.splitlines()) == [f"[0-1] {first} {first}", f"[2-3] {first} {other}"]
    assert second[0] == 0
