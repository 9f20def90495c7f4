"""Manifests against the API's schemas, our own short ones, and, where they are installed, those of the operators."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from unidist_command import Command

from unidist.errors import ConfigurationError
from unidist_kubernetes.kinds import objects
from unidist_kubernetes.manifest import JobKind, Manifest

jsonschema = pytest.importorskip("jsonschema", reason="in the extra `test`")

SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())
USUAL: dict[str, Any] = {
    "kind": JobKind.JOB,
    "name": "train",
    "image": "registry.example/train:1",
    "num_pods": 2,
    "slots": 2,
    "arguments": ("train.py",),
}


def check(document: dict[str, Any]) -> None:
    """Raise unless a document has the form that the API takes."""
    kind = "VolcanoJob" if document["apiVersion"].startswith("batch.volcano.sh") else document["kind"]
    schema = {"$ref": f"#/$defs/{kind}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(document)


def manifest(**changes: Any) -> list[dict[str, Any]]:
    return objects(Manifest(**{**USUAL, **changes}))


def containers(document: Any) -> Iterator[dict[str, Any]]:
    """Yield every container of a document."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if key == "containers":
            yield from value
        elif isinstance(value, dict | list):
            yield from containers(value)


def is_part(wanted: Any, found: Any) -> bool:
    """Return whether everything is found again: a model leaves out what it does not know, and adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and is_part(wanted[key], found[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(wanted) == len(found) and all(map(is_part, wanted, found))
    return bool(wanted == found)


def unknown(document: Any, name: str, models: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a document that a client's model of this name does not have."""
    inner = re.fullmatch(r"(?:list\[|dict\(str, )(\w+)[\])]", name)
    if inner is not None:
        for item in document.values() if name.startswith("dict") else document:
            yield from unknown(item, inner[1], models)
    elif hasattr(models.get(name), "attribute_map"):
        attributes = {field: attribute for attribute, field in models[name].attribute_map.items()}
        for key, value in document.items():
            if key in attributes:
                yield from unknown(value, models[name].openapi_types[attributes[key]], models)
            else:
                yield f"{name}.{key}"


@pytest.mark.parametrize("kind", list(JobKind))
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
def test_manifests_have_the_form_that_the_api_takes(kind: JobKind, changes: dict[str, Any]) -> None:
    documents = manifest(kind=kind, **changes)
    for document in documents:
        check(document)
    assert yaml.safe_load("".join(yaml.safe_dump(document) for document in documents[-1:])) == documents[-1]
    assert [document["kind"] for document in documents] == {
        JobKind.JOB: ["Service", "Job"],
        JobKind.JOBSET: ["JobSet"],
        JobKind.MPIJOB: ["MPIJob"],
        JobKind.TRAINJOB: ["TrainingRuntime", "TrainJob"],
        JobKind.TFJOB: ["TFJob"],
        JobKind.VOLCANO: ["Job"],
    }[kind]
    volumes = re.findall(r"'name': '(unidist-secret|shared-memory)'", str(documents))
    assert all(volumes.count(name) % 2 == 0 for name in volumes), "every mount has its volume"


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
    (jobset,) = manifest(kind=JobKind.JOBSET, max_restarts=3)
    (container,) = containers(jobset)
    assert {"name": "UNIDIST_POD_LEADER", "value": "train-workers-0-0.train:29400"} in container["env"]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    launcher, worker = containers(manifest(kind=JobKind.MPIJOB, arguments=("--strategy", "zero=2", "train.py"))[0])
    assert launcher["command"][3:9] == ["launch", "--hostfile", "/etc/mpi/hostfile", "-np", "4", "--strategy"]
    assert worker["command"] == ["/usr/sbin/sshd", "-De"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Train"}, "--name 'Train': small letters"),
        ({"name": "x" * 62}, "at most 63 characters"),
        ({"memory": "64 GB"}, "--memory '64 GB': Kubernetes takes quantities"),
        ({"max_restarts": 1}, "--max-restarts needs --kind jobset or trainjob or volcano"),
        ({"kind": JobKind.TRAINJOB, "port": 2000}, "--port has no effect on --kind trainjob"),
        (
            {"kind": JobKind.TFJOB, "num_pods": 1},
            "the operator of TFJobs tells a single pod nothing; use --kind job",
        ),
        ({"kind": JobKind.JOB, "queue": "q"}, "--queue needs --kind volcano"),
        (
            {"kind": JobKind.TRAINJOB, "env": {"PET_NNODES": "2"}},
            "--env PET_NNODES: the pods are told their place by it",
        ),
        ({"env": {"TF_CONFIG": "{}"}}, "--env TF_CONFIG: the pods are told their place"),
        ({"env": {"UNIDIST_POD_SLOTS": "2"}}, "--env UNIDIST_POD_SLOTS: the pods"),
        ({"arguments": ("--min-np", "1", "train.py")}, "need --kind jobset"),
        (
            {"kind": JobKind.JOBSET, "arguments": ("-np", "2", "--max-np", "5", "train.py")},
            "5 ranks are asked for, but 2 pods with 2 ranks each have room for 4",
        ),
        (
            {"kind": JobKind.JOBSET, "arguments": ("--host-discovery-script", "x", "t.py")},
            "tell the launcher that they",
        ),
        (
            {"kind": JobKind.JOBSET, "arguments": ("--min-np", "1", "--state-dir", "x", "t.py")},
            "has another address",
        ),
        ({"kind": JobKind.MPIJOB, "secret": "mine"}, "--secret has no effect on an MPIJob"),
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
    done = command.run_here(*options, "--", "--stratgy", "zero=2", "train.py")
    assert done.returncode == 2
    assert "Did you mean" in done.stderr


def test_every_kind_that_waits_for_all_its_pods_says_how_many() -> None:
    runtime, job = manifest(kind=JobKind.TRAINJOB, env={"A": "b"}, gpus=2)
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    assert job["spec"]["trainer"]["env"] == [{"name": "A", "value": "b"}]
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "PET_" not in str((runtime, job))
    (tfjob,) = manifest(kind=JobKind.TFJOB, num_pods=3)
    replicas = {role: each["replicas"] for role, each in tfjob["spec"]["tfReplicaSpecs"].items()}
    assert replicas == {"Chief": 1, "Worker": 2}
    (gang,) = manifest(kind=JobKind.VOLCANO, queue="research", max_restarts=2)
    spec = gang["spec"]
    assert (spec["minAvailable"], spec["tasks"][0]["replicas"], spec["queue"]) == (2, 2, "research")
    assert spec["maxRetry"] == 3
    assert spec["schedulerName"] == "volcano"


def test_a_jobset_whose_pods_come_and_go_ends_as_its_launcher_does() -> None:
    (jobset,) = manifest(kind=JobKind.JOBSET, arguments=("--min-np", "1", "train.py"))
    check(jobset)
    launcher, workers = jobset["spec"]["replicatedJobs"]
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["launcher"]}
    assert launcher["template"]["spec"]["backoffLimit"] == 0
    assert workers["template"]["spec"]["backoffLimit"] == 2**31 - 1
    assert (launcher["template"]["spec"]["completions"], workers["template"]["spec"]["completions"]) == (1, 2)
    for container in containers(jobset):
        assert container["command"][3:] == ["launch", "-np", "4", "--min-np", "1", "train.py"]


@pytest.mark.parametrize("arguments", [("train.py",), ("--min-np", "1", "train.py")], ids=["fixed", "elastic"])
@pytest.mark.parametrize("kind", list(JobKind))
def test_the_operators_own_models_take_the_manifest(kind: JobKind, arguments: tuple[str, ...]) -> None:
    if arguments[0] == "--min-np" and kind is not JobKind.JOBSET:
        pytest.skip("elastic jobs are JobSets")
    why = "operators' models, in the extra `kubernetes`"
    everything: dict[str, Any] = {"gpus": 1, "shared_memory": "1Gi", "env": {"A": "b"}}
    documents = manifest(kind=kind, arguments=arguments, **everything)
    if kind is JobKind.JOB:
        kubernetes = pytest.importorskip("kubernetes_validate", reason=why)
        for document in documents:
            kubernetes.validate(document, "1.33", strict=True)
    elif kind in (JobKind.TRAINJOB, JobKind.JOBSET):
        models = pytest.importorskip("kubeflow_trainer_api.models", reason=why)
        for document in documents:
            model = {
                "JobSet": models.JobsetV1alpha2JobSet,
                "TrainJob": models.TrainerV1alpha1TrainJob,
                "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
            }[document["kind"]]
            assert is_part(document, model.from_dict(document).to_dict())
    elif kind is JobKind.TFJOB:
        training = pytest.importorskip("kubeflow.training.models", reason=why)
        core = pytest.importorskip("kubernetes.client.models", reason=why)
        known = {**vars(core), **vars(training)}
        for document in documents:
            assert list(unknown(document, "KubeflowOrgV1TFJob", known)) == []
        documents[0]["spec"]["tfReplicaSpecs"]["Chief"]["restarts"] = 1
        assert list(unknown(documents[0], "KubeflowOrgV1TFJob", known)) == ["KubeflowOrgV1ReplicaSpec.restarts"]
    else:
        pytest.skip(f"there are no models of a {kind} that are on PyPI and usable; see the short schemas")


def test_a_model_leaves_out_what_it_does_not_know() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="operators' models, in the extra `kubernetes`")
    _, job = manifest(kind=JobKind.TRAINJOB)
    job["spec"]["trainer"]["numProcPerPod"] = 2
    assert not is_part(job, models.TrainerV1alpha1TrainJob.from_dict(job).to_dict())
