"""Manifests for Kubernetes: an indexed Job with its headless Service, a JobSet, or an MPIJob. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from unidist.errors import ConfigurationError
from unidist_kubernetes import launcher as pods

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_MAX_LABEL = 63  # of DNS; of a pod's host name, for which index and job's name are joined
_SECRET_FOLDER, _SECRET_KEY = "/var/run/secrets/unidist", "secret"
_GROUP = 65534
"""Group that may read the Secret: images that do not run as root could not, otherwise."""
_WORKERS = "workers"
_MPI_HOSTFILE = "/etc/mpi/hostfile"
"""Where the MPI operator writes the workers, in the format of `--hostfile`."""

Object = dict[str, Any]


class Kind(StrEnum):
    """Kinds of objects that a manifest can describe."""

    JOB = "job"
    JOBSET = "jobset"
    MPIJOB = "mpijob"


@dataclass(frozen=True)
class Manifest:
    """A job on Kubernetes.

    Args:
        kind: what to write.
        name: of the job; pods are called after it.
        image: with Python, unidist and the script.
        num_pods: number of pods that have ranks.
        slots: ranks of each.
        arguments: of `unidist launch`.
        namespace: "" leaves it to kubectl.
        gpus: of each pod (nvidia.com/gpu).
        cpus: of each pod, as a quantity ("8", "500m"); "" asks for none.
        memory: likewise ("64Gi").
        shared_memory: size of /dev/shm, for a script's own workers ("8Gi"); "" leaves the container's 64 MB.
        secret: name of the Secret that holds the job's secret.
        port: of the first pod's control server.
        folder: in which the script runs; "" leaves it to the image.
        python: interpreter of the image.
        env: variables of every rank.
        max_restarts: how often a JobSet begins again after a failure.

    Raises:
        ConfigurationError: a value cannot stand in a manifest, or has no effect on this kind; says which and why.
    """

    kind: Kind
    name: str
    image: str
    num_pods: int
    slots: int
    arguments: Sequence[str]
    namespace: str = ""
    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = ""
    secret: str = ""
    port: int = 29400
    folder: str = ""
    python: str = "python"
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0

    def __post_init__(self) -> None:
        longest = (
            f"{self.name}-{_WORKERS}-0-{self.num_pods}" if self.kind is Kind.JOBSET else f"{self.name}-{self.num_pods}"
        )
        if not _LABEL.fullmatch(self.name) or len(longest) > _MAX_LABEL:
            raise ConfigurationError(
                f"--name {self.name!r}: small letters, digits and dashes, a letter first; with what is added to name "
                f"the pods ({longest}) at most {_MAX_LABEL} characters."
            )
        for option, quantity in (("cpus", self.cpus), ("memory", self.memory), ("shm-size", self.shared_memory)):
            if quantity and not _QUANTITY.fullmatch(quantity):
                raise ConfigurationError(
                    f"--{option} {quantity!r}: Kubernetes takes quantities such as 8, 500m or 64Gi."
                )
        if self.max_restarts and self.kind is not Kind.JOBSET:
            raise ConfigurationError("--max-restarts needs --kind jobset: the others do not begin again as a whole.")
        if self.secret and self.kind is Kind.MPIJOB:
            raise ConfigurationError("--secret has no effect on an MPIJob: its operator makes keys for ssh.")

    @property
    def secret_name(self) -> str:
        """Name of the Secret that the pods mount."""
        return self.secret or f"{self.name}-unidist"

    def objects(self) -> list[Object]:
        """Return the objects to create, in that order."""
        makers: dict[Kind, Callable[[], list[Object]]] = {
            Kind.JOB: self._job,
            Kind.JOBSET: self._jobset,
            Kind.MPIJOB: self._mpijob,
        }
        return makers[self.kind]()

    def _job(self) -> list[Object]:
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(),
            "spec": {
                "clusterIP": "None",
                "selector": {"job-name": self.name},  # a label that Kubernetes gives the pods of a Job
                "publishNotReadyAddresses": True,  # pods meet before any of them is ready
            },
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(),
            "spec": self._job_spec(leader=f"{self.name}-0.{self.name}", pod={"subdomain": self.name}),
        }
        return [service, job]

    def _jobset(self) -> list[Object]:
        leader = f"{self.name}-{_WORKERS}-0-0.{self.name}"
        job = {"name": _WORKERS, "replicas": 1, "template": {"spec": self._job_spec(leader=leader, pod={})}}
        return [
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": self._metadata(),
                "spec": {
                    "network": {"enableDNSHostnames": True, "subdomain": self.name},
                    "failurePolicy": {"maxRestarts": self.max_restarts},
                    "replicatedJobs": [job],
                },
            }
        ]

    def _mpijob(self) -> list[Object]:
        np = [] if _gives_num_proc(self.arguments) else ["-np", str(self.num_pods * self.slots)]
        launcher = {**self._container(), "command": self._command("--hostfile", _MPI_HOSTFILE, *np)}
        worker = {**self._container(), "command": ["/usr/sbin/sshd", "-De"]}
        worker |= self._resources()
        replicas = {"Launcher": (1, launcher, {}), "Worker": (self.num_pods, worker, self._volumes(secret=False))}
        return [
            {
                "apiVersion": "kubeflow.org/v2beta1",
                "kind": "MPIJob",
                "metadata": self._metadata(),
                "spec": {
                    "slotsPerWorker": self.slots,
                    "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
                    "mpiReplicaSpecs": {
                        name: {
                            "replicas": count,
                            "restartPolicy": "Never",
                            "template": {"spec": {"containers": [container], **volumes}},
                        }
                        for name, (count, container, volumes) in replicas.items()
                    },
                },
            }
        ]

    def _job_spec(self, *, leader: str, pod: Object) -> Object:
        own = {
            pods.LEADER: f"{leader}:{self.port}",
            pods.PODS: str(self.num_pods),
            pods.SLOTS: str(self.slots),
            pods.SECRET_FILE: f"{_SECRET_FOLDER}/{_SECRET_KEY}",
        }
        container = self._container()
        container["command"] = self._command()
        container["env"] = [*container.get("env", []), *({"name": name, "value": text} for name, text in own.items())]
        container["ports"] = [{"name": "control", "containerPort": self.port}]
        container |= self._resources()
        mounts = [{"name": "unidist-secret", "mountPath": _SECRET_FOLDER, "readOnly": True}]
        container["volumeMounts"] = [*mounts, *container.get("volumeMounts", [])]
        return {
            "completionMode": "Indexed",
            "completions": self.num_pods,
            "parallelism": self.num_pods,
            "backoffLimit": 0,  # a pod that begins again finds a job that has ended
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    **pod,
                    "securityContext": {"fsGroup": _GROUP},
                    "containers": [container],
                    **self._volumes(secret=True),
                }
            },
        }

    def _command(self, *options: str) -> list[str]:
        return [self.python, "-m", "unidist_launch", "launch", *options, *self.arguments]

    def _container(self) -> Object:
        found: Object = {"name": "unidist", "image": self.image}
        if self.folder:
            found["workingDir"] = self.folder
        if self.env:
            found["env"] = [{"name": name, "value": value} for name, value in self.env.items()]
        return found

    def _resources(self) -> Object:
        """Return the keys of a container with ranks that say what it needs."""
        wanted = {"cpu": self.cpus, "memory": self.memory, "nvidia.com/gpu": str(self.gpus) if self.gpus else ""}
        limits = {name: text for name, text in wanted.items() if text}
        found: Object = {"resources": {"requests": dict(limits), "limits": limits}} if limits else {}
        if self.shared_memory:
            found["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        return found

    def _volumes(self, *, secret: bool) -> Object:
        found: list[Object] = []
        if secret:
            source = {"secretName": self.secret_name, "defaultMode": 0o400}
            found.append({"name": "unidist-secret", "secret": source})
        if self.shared_memory:
            found.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": self.shared_memory}})
        return {"volumes": found} if found else {}

    def _metadata(self) -> Object:
        return {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}


def _gives_num_proc(arguments: Sequence[str]) -> bool:
    from unidist_launch.commands.arguments import launch_parameters

    return launch_parameters(arguments)["num_proc"] is not None
