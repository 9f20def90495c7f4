"""Discovery of pods, by a kubectl that prints what the API would."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from unidist_command import Command

from unidist_kubernetes import discovery as kubernetes_discovery


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
