"""The pods that a cluster makes of a manifest: names in DNS, commands, and the variables that operators set.

There is no cluster here. What Kubernetes, JobSet, Kubeflow's operators and Volcano do with an object is taken from
their documentation and sources.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class ClusterPod:
    """A pod.

    Args:
        dns: its name in DNS, as the others of the job use it.
        words: the container's command.
        env: the container's variables.
    """

    dns: str
    words: list[str]
    env: dict[str, str]


def pods_of(documents: list[Object]) -> list[ClusterPod]:
    """Return the pods of a manifest's objects, the first one first."""
    objects = {each["kind"]: each for each in documents}
    job = documents[-1]
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "TrainJob":
        return list(_of_trainer(objects["TrainingRuntime"], job))
    if job["kind"] == "TFJob":
        return list(_of_tfjob(name, spec))
    if job["kind"] == "JobSet":
        return [
            pod
            for part in spec["replicatedJobs"]
            for pod in _indexed(f"{name}-{part['name']}-0", part["template"]["spec"], subdomain=name)
        ]
    if "tasks" in spec:
        return list(_of_volcano(name, spec))
    return list(_indexed(name, spec, subdomain=spec["template"]["spec"]["subdomain"]))


def _indexed(name: str, spec: Object, *, subdomain: str) -> Iterator[ClusterPod]:
    (container,) = spec["template"]["spec"]["containers"]
    for index in range(spec["completions"]):
        env = _variables(container, f"{name}-{index}-{secrets.token_hex(2)}")
        yield ClusterPod(
            f"{name}-{index}.{subdomain}", container["command"], {**env, "JOB_COMPLETION_INDEX": str(index)}
        )


def _of_trainer(runtime: Object, job: Object) -> Iterator[ClusterPod]:
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    given = {**_variables(container), **_variables(trainer)}
    assert not any(each.startswith("PET_") for each in given), "the operator refuses such a job"
    for index in range(trainer["numNodes"]):
        own = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
            "JOB_COMPLETION_INDEX": str(index),
        }
        yield ClusterPod(f"{name}-node-0-{index}.{name}", trainer["command"], {**given, **own})


def _of_tfjob(name: str, spec: Object) -> Iterator[ClusterPod]:
    cluster: dict[str, list[str]] = {}
    for role, replica in spec["tfReplicaSpecs"].items():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "tfjob-port"]
        hosts = [f"{name}-{role.lower()}-{index}.default.svc" for index in range(replica["replicas"])]
        cluster[role.lower()] = [f"{host}:{port}" for host in hosts]
    for role, replica in spec["tfReplicaSpecs"].items():
        (container,) = replica["template"]["spec"]["containers"]
        for index, address in enumerate(cluster[role.lower()]):
            task = {"type": role.lower(), "index": index}
            config = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
            env = {**_variables(container), "TF_CONFIG": config}
            yield ClusterPod(address.rpartition(":")[0], container["command"], env)


def _of_volcano(name: str, spec: Object) -> Iterator[ClusterPod]:
    (task,) = spec["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    assert {"env", "svc"} <= set(spec["plugins"])
    hosts = [f"{name}-{task['name']}-{index}.{name}" for index in range(task["replicas"])]
    for index, host in enumerate(hosts):
        own = {
            "VC_TASK_INDEX": str(index),
            "VK_TASK_INDEX": str(index),
            "VC_WORKER_HOSTS": ",".join(hosts),
            "VC_WORKER_NUM": str(len(hosts)),
        }
        yield ClusterPod(host, container["command"], {**_variables(container), **own})


def _variables(container: Object, pod_name: str = "") -> dict[str, str]:
    return {
        each["name"]: each["value"] if "value" in each else _field(each["valueFrom"], pod_name)
        for each in container.get("env", [])
    }


def _field(source: Object, pod_name: str) -> str:
    assert source == {"fieldRef": {"fieldPath": "metadata.name"}}
    return pod_name
