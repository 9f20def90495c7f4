"""The checked description of a job on Kubernetes, from which `kinds` writes a manifest. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from unidist.errors import ConfigurationError
from unidist_kubernetes import place

WORKERS, LAUNCHER = "workers", "launcher"
"""Names of the sets of pods in a JobSet."""

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_MAX_LABEL = 63  # of DNS; of a pod's host name, for which index and job's name are joined
_DEFAULT_PORT = 29400
_OF_THE_OPERATOR = re.compile(r"PET_.*|VC_.*|UNIDIST_PODS|UNIDIST_POD_.*")


class JobKind(StrEnum):
    """Kinds of objects that a manifest can describe."""

    JOB = "job"
    JOBSET = "jobset"
    MPIJOB = "mpijob"
    TRAINJOB = "trainjob"
    TFJOB = "tfjob"
    VOLCANO = "volcano"


_LONGEST_NAMES = {
    JobKind.JOB: "{name}-{last}",
    JobKind.JOBSET: "{name}-workers-0-{last}",
    JobKind.MPIJOB: "{name}-worker-{last}",
    JobKind.TRAINJOB: "{name}-node-0-{last}",
    JobKind.TFJOB: "{name}-worker-{last}",
    JobKind.VOLCANO: "{name}-worker-{last}",
}
"""Host names of the pods, of which one is the longest."""


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
        port: of the first pod's control server; None: 29400, or what the operator says.
        folder: in which the script runs; "" leaves it to the image.
        python: interpreter of the image.
        env: variables of every rank.
        max_restarts: how often a JobSet, a TrainJob or a Volcano job begins again after a failure.
        queue: of Volcano; "" leaves it to its default.

    Raises:
        ConfigurationError: a value cannot stand in a manifest, or has no effect on this kind; says which and why.
    """

    kind: JobKind
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
    port: int | None = None
    folder: str = ""
    python: str = "python"
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    queue: str = ""

    def __post_init__(self) -> None:
        longest = _LONGEST_NAMES[self.kind].format(name=self.name, last=self.num_pods)
        if self.is_elastic:
            longest = max(longest, f"{self.name}-{LAUNCHER}-0-0", key=len)
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
        self._check_effect()
        self._check_variables()
        if self.kind is JobKind.TFJOB and self.num_pods == 1:
            raise ConfigurationError(
                "--kind tfjob --nodes 1: the operator of TFJobs tells a single pod nothing; use --kind job."
            )
        if self.is_elastic:
            self._check_elastic()

    @property
    def secret_name(self) -> str:
        """Name of the Secret that the pods mount."""
        return self.secret or f"{self.name}-unidist"

    @property
    def control_port(self) -> int:
        """Port of the first pod's control server."""
        return self.port or _DEFAULT_PORT

    @property
    def is_elastic(self) -> bool:
        """Return whether the pods come and go."""
        return any(self._launch_options()[name] is not None for name in ("min_np", "max_np", "host_discovery_script"))

    @property
    def num_proc(self) -> int | None:
        """Number of ranks, where the arguments say it."""
        number = self._launch_options()["num_proc"]
        return None if number is None else int(number)

    def _launch_options(self) -> Mapping[str, Any]:
        from unidist_launch.commands.arguments import launch_parameters

        return launch_parameters(self.arguments)

    def _check_effect(self) -> None:
        """Refuse what has no effect on this kind."""
        restarting = (JobKind.JOBSET, JobKind.TRAINJOB, JobKind.VOLCANO)
        if self.max_restarts and self.kind not in restarting:
            raise ConfigurationError(
                f"--max-restarts needs --kind {' or '.join(restarting)}: the others do not begin again as a whole."
            )
        if self.secret and self.kind is JobKind.MPIJOB:
            raise ConfigurationError("--secret has no effect on an MPIJob: its operator makes keys for ssh.")
        if self.port and self.kind in (JobKind.MPIJOB, JobKind.TRAINJOB):
            raise ConfigurationError(f"--port has no effect on --kind {self.kind}: its operator chooses the port.")
        if self.queue and self.kind is not JobKind.VOLCANO:
            raise ConfigurationError("--queue needs --kind volcano.")

    def _check_variables(self) -> None:
        reserved = {place.TF_CONFIG, *place.INDICES}
        for name in self.env:
            if name in reserved or _OF_THE_OPERATOR.fullmatch(name):
                raise ConfigurationError(
                    f"--env {name}: the pods are told their place by it; leave it to Kubernetes, its operators and the "
                    "manifest."
                )

    def _check_elastic(self) -> None:
        if self.kind is not JobKind.JOBSET:
            raise ConfigurationError(
                f"--kind {self.kind} has a fixed number of pods; ranks that come and go (--min-np, --max-np) need "
                "--kind jobset."
            )
        options, slots = self._launch_options(), self.num_pods * self.slots
        if options["host_discovery_script"] is not None:
            raise ConfigurationError(
                "--host-discovery-script: the pods of a JobSet tell the launcher that they are there."
            )
        if options["state_dir"] is not None:
            raise ConfigurationError(
                "--state-dir: the pod of another launcher has another address; --checkpoint-dir and --max-restarts "
                "begin a job again from a checkpoint."
            )
        wanted = max(options[name] or 0 for name in ("num_proc", "min_np", "max_np"))
        if wanted > slots:
            raise ConfigurationError(
                f"{wanted} ranks are asked for, but {self.num_pods} pods with {self.slots} ranks each have room for "
                f"{slots}: give more --nodes or --slots-per-node."
            )
