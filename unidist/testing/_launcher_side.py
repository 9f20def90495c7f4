"""The process in which the conformance suite of launchers runs one: `python -m unidist.testing._launcher_side JSON`.

It is a separate process because a launcher handles signals and may be killed.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist.jobs import run_program
from unidist.launcher import ElasticLimits, Host, Job, Launcher, RemoteShell, SideProcess
from unidist.registry import load_object

REFUSED = 98
"""Exit code of this process where the launcher raised ConfigurationError."""


def main(text: str) -> int:
    """Run the job that `text` describes; returns the launcher's exit code."""
    wanted = json.loads(text)
    launcher: Launcher = load_object(wanted["path"], "the launcher")()
    folder = wanted["output_dir"]
    job = Job(
        tuple(wanted["command"]),
        wanted["num_proc"],
        env=wanted["env"],
        output_dir=Path(folder) if folder else None,
        grace_period=timedelta(seconds=5),
        hosts=tuple(Host(name, slots) for name, slots in wanted["hosts"]),
        remote_shell=RemoteShell(wanted.get("ssh", "ssh")),
        heartbeat=timedelta(seconds=wanted.get("heartbeat_sec", 5)),
        side_processes=tuple(
            SideProcess(**{**each, "command": tuple(each["command"])}) for each in wanted.get("side_processes", ())
        ),
        outlives_ranks=bool(wanted.get("outlives_ranks")),
        elastic=ElasticLimits(*wanted["elastic"]) if "elastic" in wanted else None,
    )
    try:
        return launcher.run(job)
    except ConfigurationError as exc:
        print(f"refused: {exc}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1]))
