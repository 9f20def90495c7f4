"""Asks an engine whether it can carry a job on this machine, in a process that ends again.

The answer can take a framework, seconds and a driver's state, none of which the launcher may keep: it forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from unidist.engine import Engine
from unidist.errors import ConfigurationError, UnidistError
from unidist.jobs.program import run_program
from unidist.topology import Topology

_ANSWER_SEC = 120.0
_MARK = "unidist-engine-check:"
"""Begins the line with the answer: what an engine imports may print, too."""


def check(engine: Engine, name: str, topology: Topology) -> None:
    """Ask an engine in this process.

    Raises:
        ConfigurationError: it cannot be used here, or not for these ranks; says why.
    """
    for found, where in (
        (engine.availability(), "on this machine"),
        (engine.supports(topology), f"for {topology.world_size} processes"),
    ):
        if not found.usable:
            raise ConfigurationError(f"engine {name!r} cannot be used {where}: {found.reason}")


def ask(name: str, topology: Topology, environ: Mapping[str, str]) -> str:
    """Ask an engine in another process.

    Args:
        name: of the engine.
        topology: place of one of the ranks.
        environ: the environment of the ranks, which may hide devices or packages.

    Returns:
        Why it cannot be used; "" if it can.
    """
    command = [sys.executable, "-m", "unidist.jobs.engine_check", name, json.dumps(asdict(topology))]
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_SEC
        )
    except subprocess.TimeoutExpired:
        return f"engine {name!r} cannot be used: it did not say within {_ANSWER_SEC:g} s whether it can"
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return str(json.loads(line.removeprefix(_MARK)))
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"engine {name!r} cannot be used: asking it ended with code {done.returncode}: {last}"


def main() -> None:
    """Answer in the process that `ask` has started."""
    from unidist.runtime.plugin_manager import PluginManager
    from unidist.settings.environment import Settings

    name, place = sys.argv[1:]
    try:
        engines = PluginManager(Settings.read().disabled_plugins).load().engines
        check(engines.get(name).load(), name, Topology(**json.loads(place)))
    except UnidistError as exc:
        problem = str(exc)
    else:
        problem = ""
    print(f"{_MARK}{json.dumps(problem)}", flush=True)


if __name__ == "__main__":
    run_program(main)
