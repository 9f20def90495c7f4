"""The place of a pod, from variables as manifests and operators set them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unidist.errors import ConfigurationError
from unidist_kubernetes.place import Pod


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


def tf_config(role: str, index: Any, **cluster: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


CHIEF, WORKERS = ["t-chief-0.a.svc:2222"], ["t-worker-0.a.svc:2222", "t-worker-1.a.svc:2222"]


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "secret").write_text("x" * 16)
    return {"UNIDIST_POD_SECRET_FILE": str(tmp_path / "secret")}


def test_the_chief_of_a_tfjob_leads_and_workers_follow(secret: dict[str, str]) -> None:
    found = [
        Pod.read({**secret, "TF_CONFIG": tf_config(role, index, chief=CHIEF, worker=WORKERS)})
        for role, index in (("chief", 0), ("worker", 0), ("worker", 1))
    ]
    assert [pod.index for pod in found] == [0, 1, 2]
    assert {pod.names for pod in found} == {("t-chief-0", "t-worker-0", "t-worker-1")}
    assert {(pod.leader, pod.port) for pod in found} == {("t-chief-0.a.svc", 2222)}
    alone = Pod.read({**secret, "UNIDIST_POD_SLOTS": "3", "TF_CONFIG": tf_config("worker", 1, worker=WORKERS)})
    assert (alone.index, alone.leader, alone.slots) == (1, "t-worker-0.a.svc", 3)


def test_servers_and_evaluators_of_a_tfjob_have_no_ranks(secret: dict[str, str]) -> None:
    servers = ["t-ps-0.a.svc:2222", "t-ps-1.a.svc:2222"]
    found = [
        Pod.read({**secret, "TF_CONFIG": tf_config(role, index, chief=CHIEF, worker=WORKERS, ps=servers)})
        for role, index in (("chief", 0), ("ps", 1), ("evaluator", 0))
    ]
    assert [pod.index for pod in found] == [0, 4, 5]
    assert [pod.task for pod in found] == [None, ("ps", 1), ("evaluator", 0)]
    assert {pod.names for pod in found} == {("t-chief-0", "t-worker-0", "t-worker-1")}
    assert {pod.leader for pod in found} == {"t-chief-0.a.svc"}
    assert found[0].others == {"ps": 2, "evaluator": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON"),
        ("[]", "it has the form"),
        ('{"task": {"type": "worker", "index": 0}}', "it has the form"),
        ('{"sparseCluster": {}, "task": {"type": "worker", "index": 0}}', "it has the form"),
        (tf_config("worker", 2, worker=WORKERS), "task worker 2 is not among the 2 of the cluster"),
        (tf_config("worker", True, worker=WORKERS), "task worker True is not among"),
        (tf_config("worker", -1, worker=WORKERS), "task worker -1 is not among"),
        (tf_config("chief", 0, worker=WORKERS), "task chief 0 is not among the 0"),
        (tf_config("worker", 0, worker=WORKERS, tpu=["a:1"]), "it has the role tpu; unidist has ranks in the roles"),
        (tf_config("tpu", 0, worker=WORKERS), "it has the role tpu"),
        (tf_config("evaluator", "x", worker=WORKERS), "task evaluator 'x' is not among"),
        (tf_config("ps", 1, worker=WORKERS, ps=["a:1"]), "task ps 1 is not among the 1"),
        (tf_config("ps", 0, ps=["a:1"]), "its cluster has no chief and no worker"),
        (tf_config("worker", 0, worker="a:1"), "worker of the cluster is 'a:1', no list of HOST:PORT"),
        (tf_config("worker", 0, worker=["a"]), "'a' is not HOST:PORT"),
        (tf_config("chief", 0, chief=["a:1", "b:1"]), "its cluster has 2 of the role chief"),
    ],
)
def test_a_tf_config_that_says_nothing_usable_is_told_in_a_line(
    secret: dict[str, str], text: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match="TF_CONFIG") as raised:
        Pod.read({**secret, "TF_CONFIG": text})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


TRAINER = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "t-node-0-0.t",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}


def test_pods_of_a_trainjob_read_what_is_meant_for_torchrun(secret: dict[str, str]) -> None:
    pod = Pod.read({**secret, **TRAINER})
    assert (pod.index, pod.slots, pod.leader, pod.port) == (1, 4, "t-node-0-0.t", 29500)
    assert pod.names == ("t-node-0-0", "t-node-0-1")
    assert Pod.read({**secret, **TRAINER, "PET_NPROC_PER_NODE": "auto"}).slots == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES='1:4' is not a whole number"),
        ({"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2, PET_NNODES=2"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
        ({"PET_MASTER_PORT": "x"}, "PET_MASTER_PORT='x' is not a whole number"),
    ],
)
def test_a_trainjob_whose_variables_cannot_be_says_which(
    secret: dict[str, str], changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Pod.read({**secret, **TRAINER, **changes})


def test_several_pods_without_a_secret_are_refused_and_one_needs_none() -> None:
    with pytest.raises(ConfigurationError, match="a TrainJob with 2 pods, which have no secret in common"):
        Pod.read(TRAINER)
    with pytest.raises(ConfigurationError, match="a TFJob with 2 pods"):
        Pod.read({"TF_CONFIG": tf_config("worker", 0, worker=WORKERS)})
    alone = Pod.read({"TF_CONFIG": tf_config("worker", 0, worker=WORKERS[:1])})
    assert len(alone.secret) == 32


def test_pods_are_named_as_kubernetes_names_them(secret: dict[str, str]) -> None:
    job = {"UNIDIST_POD_LEADER": "t-0.t:1", "UNIDIST_PODS": "3", "UNIDIST_POD_SLOTS": "1", "JOB_COMPLETION_INDEX": "2"}
    assert Pod.read({**secret, **job}).names == ("t-0", "t-1", "t-2")
