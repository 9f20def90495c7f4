"""The variable TF_CONFIG, by which TensorFlow's own tools learn which processes a job has. Pure.

It is written for jobs with processes beside their ranks, whose number does not change. Its form is that of TensorFlow's
`TFConfigClusterResolver`. Ranks are workers, in their order; there is no chief beside them, so worker 0 acts as chief.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unidist.launcher import SideProcess

TF_CONFIG = "TF_CONFIG"
_WORKER, _SERVER = "worker", "ps"
_OURS = "unidist"
"""In the field "environment", which TensorFlow does not read."""


@dataclass(frozen=True)
class TfCluster:
    """The processes of a job as TensorFlow's tools see them.

    Args:
        workers: HOST:PORT of each rank, by rank.
        servers: HOST:PORT of each parameter server, by index.
    """

    workers: tuple[str, ...]
    servers: tuple[str, ...] = ()

    def of_rank(self, rank: int) -> dict[str, str]:
        """Return the variable of a rank."""
        return self._variable(_WORKER, rank)

    def of(self, process: SideProcess) -> dict[str, str]:
        """Return the variable of a process beside the ranks. One that is no server is in no list, as an evaluator."""
        return self._variable(process.role, process.index)

    def _variable(self, role: str, index: int) -> dict[str, str]:
        cluster = {_WORKER: list(self.workers)}
        if self.servers:
            cluster[_SERVER] = list(self.servers)
        return {
            TF_CONFIG: json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": _OURS})
        }


def servers_of(processes: Sequence[SideProcess]) -> list[SideProcess]:
    """Return the parameter servers among processes, by index."""
    return sorted((each for each in processes if each.role == _SERVER), key=lambda each: each.index)


def is_given(environ: Mapping[str, str]) -> bool:
    """Return whether somebody else has set the variable: the user, or an operator that starts pods."""
    return bool(environ.get(TF_CONFIG)) and not is_ours(environ)


def is_ours(environ: Mapping[str, str]) -> bool:
    """Return whether the variable is that of a job of ours, as in a process that starts another job."""
    text = environ.get(TF_CONFIG, "")
    if _OURS not in text:
        return False
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("environment") == _OURS


__all__ = ["TF_CONFIG", "TfCluster", "is_given", "is_ours", "servers_of"]
