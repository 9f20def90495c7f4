"""The place of a pod in its job, as the manifest and an operator tell it by variables.

Three sources are known, the first that is there counts:

1. `UNIDIST_POD_LEADER`, `UNIDIST_PODS` and `UNIDIST_POD_SLOTS` of our own manifests, with the index that Kubernetes
   (`JOB_COMPLETION_INDEX`) or Volcano (`VC_TASK_INDEX`) gives the pod;
2. `TF_CONFIG`, by which the operator of a TFJob says who belongs to it;
3. `PET_*`, which Kubeflow Trainer sets in the pods of a TrainJob.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from unidist.errors import ConfigurationError

LEADER = "UNIDIST_POD_LEADER"
"""HOST:PORT of the first pod."""

PODS = "UNIDIST_PODS"
SLOTS = "UNIDIST_POD_SLOTS"
SECRET_FILE = "UNIDIST_POD_SECRET_FILE"
ROLE = "UNIDIST_POD_ROLE"
"""In an elastic job: whether this pod has the launcher, or ranks."""

NAME = "UNIDIST_POD_NAME"
"""In an elastic job: the pod's own name, which no other pod ever has."""

INDICES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX")
"""Set by Kubernetes itself in the pods of an indexed Job, and by Volcano's plugin `env`."""

TF_CONFIG = "TF_CONFIG"
PET_NODE_RANK = "PET_NODE_RANK"
_PET_PORT = 29500

MARKERS = (SECRET_FILE, LEADER, TF_CONFIG, PET_NODE_RANK)
"""Variables by which a pod is recognised. With the last two alone it lacks a secret, which `Pod.read` says."""

MIN_SECRET_BYTES = 16
_SERVER, _EVALUATOR = "ps", "evaluator"
_FIRST_ROLES = ("chief", "master")
"""Names that TensorFlow has for the role of the first pod; it need not be there."""


class PodRole(StrEnum):
    """The role of a pod in an elastic job."""

    LAUNCHER = "launcher"
    WORKER = "worker"


@dataclass(frozen=True)
class Pod:
    """This pod's place.

    Args:
        index: of this pod; pod 0 leads.
        names: of all pods, for messages and as hosts.
        slots: ranks of each; 0: nothing says it.
        leader: where pod 0 is reached.
        port: of its control server.
        secret: the job's secret.
        role: of this pod, in an elastic job; None: the job's pods are fixed.
        own_name: of this pod, in an elastic job.
        task: role and index of this pod in its job, if it has no ranks: a parameter server, or an evaluator.
        others: roles of the job's pods without ranks, with the number of pods of each; 0: it is not known.
    """

    index: int
    names: tuple[str, ...]
    slots: int
    leader: str
    port: int
    secret: bytes
    role: PodRole | None = None
    own_name: str = ""
    task: tuple[str, int] | None = None
    others: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Pod:
        """Read the variables of a pod.

        Raises:
            ConfigurationError: this is no pod of a job, or a variable cannot be read; names it.
        """
        if LEADER in environ:
            return _of_manifest(environ)
        if TF_CONFIG in environ:
            return _of_tf_config(environ)
        if PET_NODE_RANK in environ:
            return _of_trainer(environ)
        raise ConfigurationError(
            f"the launcher kubernetes runs in the pods of a job, and this is none: neither {LEADER} nor {TF_CONFIG} "
            f"nor {PET_NODE_RANK} is set. `unidist kubernetes manifest` writes such a job."
        )


def _of_manifest(environ: Mapping[str, str]) -> Pod:
    leader, port = _address(environ[LEADER], LEADER)
    num_pods, slots = _number(environ, PODS), _number(environ, SLOTS)
    role = environ.get(ROLE)
    if role is not None and role not in list(PodRole):
        raise ConfigurationError(f"{ROLE}={role!r}: {' or '.join(PodRole)}.")
    if role == PodRole.LAUNCHER:
        index = 0
    else:
        variable = next((name for name in INDICES if name in environ), INDICES[0])
        index = _number(environ, variable)
        if index >= num_pods or slots < 1:
            raise ConfigurationError(
                f"{variable}={index}, {PODS}={num_pods}, {SLOTS}={slots}: the index is below the number of pods, and "
                "each has at least 1 slot. completions of the Job is the number of pods."
            )
    label = leader.partition(".")[0]
    if role is not None:  # the pods with ranks are a set of their own, beside the launcher's
        label = label.replace("-launcher-0-0", "-workers-0-0")
    own_name = environ.get(NAME, "")
    if role == PodRole.WORKER and not own_name:
        raise ConfigurationError(f"{NAME} is not set; the manifest takes it from metadata.name of the pod.")
    return Pod(
        index,
        _numbered(label, num_pods),
        slots,
        leader,
        port,
        _secret(environ),
        None if role is None else PodRole(role),
        own_name,
    )


def _of_trainer(environ: Mapping[str, str]) -> Pod:
    """Read what Kubeflow Trainer's policy `torch` sets for torchrun."""
    index, num_pods = _number(environ, PET_NODE_RANK), _number(environ, "PET_NNODES")
    if index >= num_pods:
        raise ConfigurationError(f"{PET_NODE_RANK}={index}, PET_NNODES={num_pods}: the rank is below the number.")
    leader = environ.get("PET_MASTER_ADDR", "")
    if not leader:
        raise ConfigurationError("PET_MASTER_ADDR is not set, so the first pod is not known.")
    port = _number(environ, "PET_MASTER_PORT") if "PET_MASTER_PORT" in environ else _PET_PORT
    text = environ.get("PET_NPROC_PER_NODE", "auto")
    slots = int(text) if text.isdigit() and int(text) else _slots(environ)
    secret = _secret(environ, of="a TrainJob", num_pods=num_pods)
    return Pod(index, _numbered(leader.partition(".")[0], num_pods), slots, leader, port, secret)


def _of_tf_config(environ: Mapping[str, str]) -> Pod:
    """Read what the operator of a TFJob says. The chief leads; where there is none, the first worker."""
    try:
        config = json.loads(environ[TF_CONFIG])
    except ValueError as exc:
        raise _bad_tf_config(f"it is no JSON ({exc})") from None
    cluster = config.get("cluster") if isinstance(config, dict) else None
    task = config.get("task") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise _bad_tf_config('it has the form {"cluster": {"chief": ["HOST:PORT"], ...}, "task": {"type", "index"}}')
    listed: list[str] = []
    first_of: dict[str, int] = {}
    for role in (*_FIRST_ROLES, "worker"):
        first_of[role] = len(listed)
        listed += _entries(role, cluster.get(role, []))
    servers = _entries(_SERVER, cluster.get(_SERVER, []))
    strange = [str(role) for role in (*cluster, task.get("type")) if role not in (*first_of, _SERVER, _EVALUATOR)]
    if strange:
        raise _bad_tf_config(
            f"it has the role {strange[0]}; unidist has ranks in the roles chief (or master) and worker, and other "
            f"processes in the roles {_SERVER} and {_EVALUATOR}"
        )
    if not listed:
        raise _bad_tf_config("its cluster has no chief and no worker, so no pod has ranks")
    role, number = str(task["type"]), task.get("index")
    size = len(cluster.get(role, []))
    is_index = not isinstance(number, bool) and str(number).isdigit()
    # Operators list no evaluators: they belong to no training cluster.
    if not is_index or (role != _EVALUATOR and int(str(number)) >= size):
        raise _bad_tf_config(f"task {role} {number!r} is not among the {size} of the cluster")
    index = int(str(number))
    leader, port = _address(listed[0], TF_CONFIG)
    names = tuple(entry.rpartition(":")[0].partition(".")[0] for entry in listed)
    secret = _secret(environ, of="a TFJob", num_pods=len(listed) + len(servers) + (role == _EVALUATOR))
    others = {**({_SERVER: len(servers)} if servers else {}), _EVALUATOR: 0}
    if role in first_of:
        return Pod(first_of[role] + index, names, _slots(environ), leader, port, secret, others=others)
    behind = len(listed) + (index if role == _SERVER else len(servers) + index)
    return Pod(behind, names, _slots(environ), leader, port, secret, task=(role, index), others=others)


def _entries(role: str, found: Any) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise _bad_tf_config(f"{role} of the cluster is {found!r}, no list of HOST:PORT")
    if role in _FIRST_ROLES and len(found) > 1:
        raise _bad_tf_config(f"its cluster has {len(found)} of the role {role}, of which there is one")
    for entry in found:
        _address(entry, TF_CONFIG)
    return found


def _bad_tf_config(what: str) -> ConfigurationError:
    return ConfigurationError(f"{TF_CONFIG} does not say which pods there are: {what}.")


def _numbered(label: str, number: int) -> tuple[str, ...]:
    """Return the names of pods that are called as the first, with another index."""
    stem = label.removesuffix("-0") if label.endswith("-0") else "pod"
    return tuple(f"{stem}-{index}" for index in range(number))


def _address(text: str, variable: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"{variable}: {text!r} is not HOST:PORT.")
    return host, int(port)


def _slots(environ: Mapping[str, str]) -> int:
    return _number(environ, SLOTS) if SLOTS in environ else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        tip = "; the Job needs completionMode: Indexed" if name in INDICES else ""
        raise ConfigurationError(f"{name}={text!r} is not a whole number{tip}.")
    return int(text)


def _secret(environ: Mapping[str, str], *, of: str = "", num_pods: int = 2) -> bytes:
    file = environ.get(SECRET_FILE, "")
    if not file and of:
        if num_pods == 1:
            return secrets.token_bytes(32)
        raise ConfigurationError(
            f"this is a pod of {of} with {num_pods} pods, which have no secret in common: mount a Secret, and let "
            f"{SECRET_FILE} name the file (`unidist kubernetes manifest` does). With --launcher local each pod trains "
            "by itself."
        )
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as exc:
        raise ConfigurationError(
            f"{SECRET_FILE}={file!r}: the job's secret cannot be read ({exc.strerror}); is the Secret mounted there?"
        ) from exc
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"{SECRET_FILE}={file!r} holds {len(secret)} bytes; a secret has at least {MIN_SECRET_BYTES}, random ones."
        )
    return secret


__all__ = ["MARKERS", "Pod", "PodRole"]
