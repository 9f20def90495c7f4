"""The parts of a pod that a manifest describes: container, volumes, resources. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unidist_kubernetes import place
from unidist_kubernetes.manifest import Manifest

Object = dict[str, Any]

_SECRET_FOLDER, _SECRET_KEY = "/var/run/secrets/unidist", "secret"
_GROUP = 65534
"""Group that may read the Secret: images that do not run as root could not, otherwise."""


def command(wanted: Manifest, *options: str) -> list[str]:
    """Return the command of every pod: `unidist launch`, with these options before the manifest's arguments."""
    return [wanted.python, "-m", "unidist_launch", "launch", *options, *wanted.arguments]


def container(wanted: Manifest, name: str = "unidist") -> Object:
    """Return a container with the image and what the user sets."""
    found: Object = {"name": name, "image": wanted.image}
    if wanted.folder:
        found["workingDir"] = wanted.folder
    if wanted.env:
        found["env"] = variables(wanted.env)
    return found


def variables(values: Mapping[str, str]) -> list[Object]:
    """Return variables as a container lists them."""
    return [{"name": name, "value": value} for name, value in values.items()]


def pod(
    wanted: Manifest,
    found: Object,
    *,
    own: Mapping[str, str] | None = None,
    trusted: bool = True,
    has_ranks: bool = True,
) -> Object:
    """Return the specification of a pod with this container.

    Args:
        wanted: the job.
        found: the container.
        own: variables that tell the pod its place.
        trusted: it has the job's secret.
        has_ranks: it needs what ranks need.
    """
    found = dict(found)
    own = {**(own or {}), **({place.SECRET_FILE: f"{_SECRET_FOLDER}/{_SECRET_KEY}"} if trusted else {})}
    if own:
        found["env"] = [*found.get("env", []), *variables(own)]
    if has_ranks and (needed := resources(wanted)):
        found["resources"] = needed
    mounts, volumes = [], []
    if trusted:
        mounts.append({"name": "unidist-secret", "mountPath": _SECRET_FOLDER, "readOnly": True})
        source = {"secretName": wanted.secret_name, "defaultMode": 0o400}
        volumes.append({"name": "unidist-secret", "secret": source})
    if wanted.shared_memory and has_ranks:
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        memory = {"medium": "Memory", "sizeLimit": wanted.shared_memory}
        volumes.append({"name": "shared-memory", "emptyDir": memory})
    if mounts:
        found["volumeMounts"] = mounts
    whole: Object = {"securityContext": {"fsGroup": _GROUP}} if trusted else {}
    return {**whole, "containers": [found], **({"volumes": volumes} if volumes else {})}


def resources(wanted: Manifest) -> Object:
    """Return what a container with ranks needs; empty: nothing is said of it."""
    named = {
        "cpu": wanted.cpus,
        "memory": wanted.memory,
        "nvidia.com/gpu": str(wanted.gpus) if wanted.gpus else "",
    }
    limits = {name: text for name, text in named.items() if text}
    return {"requests": dict(limits), "limits": limits} if limits else {}


__all__ = ["Object", "command", "container", "pod", "resources", "variables"]
