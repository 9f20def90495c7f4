"""The agents of an elastic job whose ranks run a function: each in a process that a cluster has started."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from unidist.jobs import parent_death_signal
from unidist.jobs.pool import Record
from unidist.launcher import Host
from unidist_launch.agent import AgentOrder
from unidist_launch.elastic_calls.rank import CALL_FILE, records
from unidist_launch.remote import AgentStarter, agent_command

_WATCH_SEC = 0.2


class CallAgents(AgentStarter):
    """Has a cluster start the agents, each by `run_agent`. Subclasses say how: `summon`, `problem` and `dismiss`.

    Args:
        address: at which the agents reach the launcher.
    """

    comes_by_itself = True
    tells_termination = False
    exports = False

    def __init__(self, address: str) -> None:
        self.addresses = (address,)
        self.records: list[Record] = []
        """How the calls of the ranks ended, of agents that have ended in order."""

    @override
    def command(self, host: Host) -> Sequence[str]:
        raise AssertionError("the cluster starts agents")

    @override
    def explain(self, host: Host, returncode: int, text: str) -> str:
        raise AssertionError("the cluster starts agents")


def run_agent(order: bytes, call: bytes, watch: Callable[[Path], None] | None = None) -> tuple[str, list[Record]]:
    """Run the agent of this host to its end, as a child, which dies with the thread that calls this.

    Args:
        order: of the launcher.
        call: of `dump_call`: what each rank runs.
        watch: called several times a second, and at the end, with the folder that ranks know as `call_folder()`.

    Returns:
        How the agent ended, with what it wrote last; and how the calls of its ranks ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="unidist-call-"))
    own = AgentOrder.from_line(order)
    own = replace(own, folder=os.getcwd(), command=(*own.command, str(folder)))
    try:
        (folder / CALL_FILE).write_bytes(call)
        agent = subprocess.Popen(
            agent_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=parent_death_signal(),
        )
        given: bytes | None = own.to_line()
        while True:
            try:
                said, _ = agent.communicate(given, timeout=_WATCH_SEC)
                break
            except subprocess.TimeoutExpired:
                given = None
                if watch is not None:
                    watch(folder)
        if watch is not None:
            watch(folder)
        lines = said.decode(errors="replace").strip().splitlines()
        return f"exit code {agent.returncode}{': ' + lines[-1] if lines else ''}", records(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
