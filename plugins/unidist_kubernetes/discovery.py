"""Which pods run, for `--host-discovery-script`: what kubectl says, as lines HOST:SLOTS."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unidist.errors import ConfigurationError

_ASK_SEC = 30.0
_GPU = "nvidia.com/gpu"


def ask(kubectl: str, selector: str, namespace: str) -> Mapping[str, Any]:
    """Return the list of pods as kubectl gives it.

    Args:
        kubectl: the program.
        selector: labels of the pods.
        namespace: "" leaves it to kubectl's configuration.

    Raises:
        ConfigurationError: kubectl is missing, fails, does not answer, or writes something else.
    """
    command = [kubectl, "get", "pods", "--selector", selector, "--output", "json"]
    command += ["--namespace", namespace] if namespace else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SEC)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no {kubectl!r} on the PATH; install kubectl, or name it: --kubectl."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ConfigurationError(f"`{' '.join(command)}` failed: {exc}") from exc
    if done.returncode:
        said = done.stderr.strip() or "it says nothing"
        raise ConfigurationError(f"`{' '.join(command)}` ended with exit code {done.returncode}: {said}")
    try:
        found = json.loads(done.stdout)
        if not isinstance(found["items"], list):
            raise TypeError("items")
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"`{' '.join(command)}` wrote no list of pods: {done.stdout[:200]!r}") from None
    assert isinstance(found, dict)
    return found


def lines(listed: Mapping[str, Any], *, slots: int | None, by_name: bool) -> Iterator[str]:
    """Yield HOST:SLOTS for each pod that is ready and not about to go, ordered by name.

    Args:
        listed: of `ask`.
        slots: of each pod; None: its GPUs, or 1 where it has none.
        by_name: hosts are names in the cluster's DNS, which pods with a host name and a subdomain have; else addresses.
    """
    for pod in sorted(listed["items"], key=lambda item: str(item["metadata"]["name"])):
        if not _is_ready(pod):
            continue
        number = slots if slots is not None else max(1, sum(map(_gpus, pod["spec"].get("containers", ()))))
        host = pod["status"].get("podIP", "")
        if by_name:
            name, subdomain = pod["spec"].get("hostname"), pod["spec"].get("subdomain")
            host = f"{name}.{subdomain}" if name and subdomain else ""
        if host:
            yield f"{host}:{number}"


def _is_ready(pod: Mapping[str, Any]) -> bool:
    if "deletionTimestamp" in pod["metadata"] or pod["status"].get("phase") != "Running":
        return False
    conditions: Sequence[Mapping[str, Any]] = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _gpus(container: Mapping[str, Any]) -> int:
    text = str(container.get("resources", {}).get("limits", {}).get(_GPU, "0"))
    return int(text) if text.isdigit() else 0
