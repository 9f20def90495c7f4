"""The objects of each kind of manifest: what the API, or an operator, takes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from unidist_kubernetes import place
from unidist_kubernetes.manifest import LAUNCHER, WORKERS, JobKind, Manifest
from unidist_kubernetes.pod_template import Object, command, container, pod, resources, variables

_MPI_HOSTFILE = "/etc/mpi/hostfile"
"""Where the MPI operator writes the workers, in the format of `--hostfile`."""

_TRAINER = "trainer.kubeflow.org"
_ANY_NUMBER: Final = 2**31 - 1
"""The largest number that the API takes: pods of an elastic job may be lost again and again."""


def objects(wanted: Manifest) -> list[Object]:
    """Return the objects to create, in that order."""
    return _MAKERS[wanted.kind](wanted)


def _job(wanted: Manifest) -> list[Object]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(wanted),
        "spec": {
            "clusterIP": "None",
            "selector": {"job-name": wanted.name},  # a label that Kubernetes gives the pods of a Job
            "publishNotReadyAddresses": True,  # pods meet before any of them is ready
        },
    }
    spec = _indexed(wanted, leader=f"{wanted.name}-0.{wanted.name}", subdomain=wanted.name)
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(wanted), "spec": spec}]


def _jobset(wanted: Manifest) -> list[Object]:
    if wanted.is_elastic:
        jobs, success = _elastic_jobs(wanted)
    else:
        leader = f"{wanted.name}-{WORKERS}-0-0.{wanted.name}"
        jobs, success = [_replicated(WORKERS, _indexed(wanted, leader=leader))], {}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(wanted),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": wanted.name},
                **success,
                "failurePolicy": {"maxRestarts": wanted.max_restarts},
                "replicatedJobs": jobs,
            },
        }
    ]


def _elastic_jobs(wanted: Manifest) -> tuple[list[Object], Object]:
    """Return the launcher's pod and those with ranks; the job ends as the launcher does."""
    leader = f"{wanted.name}-{LAUNCHER}-0-0.{wanted.name}"
    options = [] if wanted.num_proc is not None else ["-np", str(wanted.num_pods * wanted.slots)]
    made = []
    for role, name, number, failures in (
        (place.PodRole.LAUNCHER, LAUNCHER, 1, 0),
        (place.PodRole.WORKER, WORKERS, wanted.num_pods, _ANY_NUMBER),
    ):
        has_ranks = role is place.PodRole.WORKER
        one = _launching(wanted, *options)
        own_name = {"name": place.NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        one["env"] = [*one.get("env", []), own_name]
        own = {**_place(wanted, leader), place.ROLE: str(role)}
        spec = {
            "completionMode": "Indexed",
            "completions": number,
            "parallelism": number,
            "backoffLimit": failures,
            "template": {"spec": {"restartPolicy": "Never", **pod(wanted, one, own=own, has_ranks=has_ranks)}},
        }
        made.append(_replicated(name, spec))
    return made, {"successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]}}


def _mpijob(wanted: Manifest) -> list[Object]:
    np = [] if wanted.num_proc is not None else ["-np", str(wanted.num_pods * wanted.slots)]
    launcher = {**container(wanted), "command": command(wanted, "--hostfile", _MPI_HOSTFILE, *np)}
    worker = {**container(wanted), "command": ["/usr/sbin/sshd", "-De"]}
    replicas = {
        "Launcher": (1, pod(wanted, launcher, trusted=False, has_ranks=False)),
        "Worker": (wanted.num_pods, pod(wanted, worker, trusted=False)),
    }
    return [
        {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": _metadata(wanted),
            "spec": {
                "slotsPerWorker": wanted.slots,
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
                "mpiReplicaSpecs": _replicas(replicas),
            },
        }
    ]


def _trainjob(wanted: Manifest) -> list[Object]:
    """A runtime and a job of it. The operator says each pod's place (PET_*), and refuses a job that sets it."""
    node = pod(wanted, container(wanted, "node"))
    (one,) = node["containers"]
    # Secret and volumes are the runtime's; what differs from job to job is the job's.
    one.pop("resources", None)
    one["env"] = [each for each in one["env"] if each["name"] not in wanted.env]
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **node}}},
        },
    }
    runtime = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**_metadata(wanted), "labels": {f"{_TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": wanted.num_pods, "torch": {}},
            "template": {
                "spec": {"failurePolicy": {"maxRestarts": wanted.max_restarts}, "replicatedJobs": [replicated]},
            },
        },
    }
    trainer: Object = {
        "image": wanted.image,
        "command": command(wanted),
        "numNodes": wanted.num_pods,
        "numProcPerNode": wanted.slots,
    }
    if wanted.env:
        trainer["env"] = variables(wanted.env)
    if needed := resources(wanted):
        trainer["resourcesPerNode"] = needed
    job = {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(wanted),
        "spec": {
            "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": wanted.name},
            "trainer": trainer,
        },
    }
    return [runtime, job]


def _tfjob(wanted: Manifest) -> list[Object]:
    """A chief and workers. The operator says who they are in TF_CONFIG."""
    one = {**container(wanted, "tensorflow"), "command": command(wanted)}  # the operator asks for these two names
    one["ports"] = [{"name": "tfjob-port", "containerPort": wanted.control_port}]
    spec = pod(wanted, one, own={place.SLOTS: str(wanted.slots)})
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "TFJob",
            "metadata": _metadata(wanted),
            "spec": {
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
                "tfReplicaSpecs": _replicas({"Chief": (1, spec), "Worker": (wanted.num_pods - 1, spec)}),
            },
        }
    ]


def _volcano(wanted: Manifest) -> list[Object]:
    """A Job of Volcano's: its pods start together, or none of them does."""
    own = _place(wanted, f"{wanted.name}-worker-0.{wanted.name}")
    task = {
        "name": "worker",
        "replicas": wanted.num_pods,
        "template": {"spec": {"restartPolicy": "Never", **pod(wanted, _launching(wanted), own=own)}},
    }
    spec: Object = {
        "schedulerName": "volcano",
        "minAvailable": wanted.num_pods,
        # The pods' names in DNS, and the index of each. Pods meet before any of them is ready.
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
        **({"queue": wanted.queue} if wanted.queue else {}),
        "tasks": [task],
    }
    if wanted.max_restarts:
        spec["policies"] = [{"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"}]
        spec["maxRetry"] = wanted.max_restarts + 1  # the job has failed once it was begun again so often
    return [{"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": _metadata(wanted), "spec": spec}]


_MAKERS: dict[JobKind, Callable[[Manifest], list[Object]]] = {
    JobKind.JOB: _job,
    JobKind.JOBSET: _jobset,
    JobKind.MPIJOB: _mpijob,
    JobKind.TRAINJOB: _trainjob,
    JobKind.TFJOB: _tfjob,
    JobKind.VOLCANO: _volcano,
}


def _indexed(wanted: Manifest, *, leader: str, subdomain: str = "") -> Object:
    """Return the specification of an indexed Job whose pods are all of the job's."""
    own = _place(wanted, leader)
    name = {"subdomain": subdomain} if subdomain else {}
    return {
        "completionMode": "Indexed",
        "completions": wanted.num_pods,
        "parallelism": wanted.num_pods,
        "backoffLimit": 0,  # a pod that begins again finds a job that has ended
        "template": {"spec": {"restartPolicy": "Never", **name, **pod(wanted, _launching(wanted), own=own)}},
    }


def _place(wanted: Manifest, leader: str) -> dict[str, str]:
    """Return the variables that tell pods their place, but for their index."""
    return {
        place.LEADER: f"{leader}:{wanted.control_port}",
        place.PODS: str(wanted.num_pods),
        place.SLOTS: str(wanted.slots),
    }


def _launching(wanted: Manifest, *options: str) -> Object:
    found = {**container(wanted), "command": command(wanted, *options)}
    found["ports"] = [{"name": "control", "containerPort": wanted.control_port}]
    return found


def _replicated(name: str, spec: Object) -> Object:
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _replicas(pods: dict[str, tuple[int, Object]]) -> Object:
    """Return the roles of an operator of Kubeflow's."""
    return {
        role: {"replicas": count, "restartPolicy": "Never", "template": {"spec": spec}}
        for role, (count, spec) in pods.items()
    }


def _metadata(wanted: Manifest) -> Object:
    return {"name": wanted.name, **({"namespace": wanted.namespace} if wanted.namespace else {})}


__all__ = ["objects"]
