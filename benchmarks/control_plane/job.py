"""The program that measures one job: its launcher runs here, its hosts in simulators.

    python -m benchmarks.control_plane.job KIND NUM_WORKERS STEADY_SEC OUTPUT [STATE_DIR]

KIND is "elastic" or "fixed". STEADY_SEC is for how long all workers only train. OUTPUT gets the fields of
`scenario.Figures` as a JSON object. With STATE_DIR the launcher keeps its state there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.control_plane.scenario import Figures, Observed, elastic_scenario, fixed_scenario
from benchmarks.control_plane.simulators import Simulators
from unidist.launcher import ElasticLimits, Host, Job, JobObserver
from unidist_launch.elastic_job import ElasticRun
from unidist_launch.remote.run import RemoteRun

SLOTS_PER_HOST = 8
WORKERS_PER_SIMULATOR = 500
_LONG = timedelta(seconds=600)
_HEARTBEAT = timedelta(seconds=30)
"""Hundreds of simulated hosts share a processor, which may be busy with other things for seconds."""


class _Observer(JobObserver):
    """Notes when what has happened."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        """Note an event."""
        self._observed.happened(event, fields, time.monotonic())

    def beat(self, worker: int, report: Mapping[str, Any]) -> None:
        """Count a heartbeat."""
        self._observed.num_beats += 1


def run(kind: str, num_workers: int, steady_sec: float, *, state_dir: Path | None = None) -> Figures:
    """Run a job of simulated workers through its scenario; returns what was measured. From the main thread."""
    observed = Observed()
    hosts = tuple(
        Host(f"simulated{index}", min(SLOTS_PER_HOST, num_workers - first))
        for index, first in enumerate(range(0, num_workers, SLOTS_PER_HOST))
    )
    job = Job(
        ("simulated",),
        num_workers,
        hosts=hosts,
        quiet=True,
        grace_period=timedelta(seconds=5),
        start_timeout=_LONG,
        heartbeat=_HEARTBEAT,
        observers=(_Observer(observed),),
    )
    if kind == "elastic":
        limits = ElasticLimits(1, num_workers, timeout=_LONG, state_dir=state_dir)
        job = Job(**{**vars(job), "elastic": limits})
    number = max(2, -(-num_workers // WORKERS_PER_SIMULATOR))
    with Simulators(number) as simulators, ExitStack() as stack:
        simulators.totals()  # they have started
        started: Any
        if kind == "elastic":
            started = ElasticRun(job, stack, starter_of=lambda host: simulators)
        else:
            started = RemoteRun(job, hosts, [simulators] * len(hosts), stack)
        found: list[Figures] = []

        def act() -> None:
            scenario = elastic_scenario if kind == "elastic" else fixed_scenario
            try:
                found.append(scenario(num_workers, steady_sec, simulators, observed))
            except Exception:
                traceback.print_exc()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        actor = threading.Thread(target=act)
        actor.start()
        started.run()
        actor.join()
    if not found:
        raise SystemExit(1)
    return found[0]


def main() -> None:
    """Measure, and write what was found."""
    kind, number, steady_sec, output, *state_dir = sys.argv[1:]
    figures = run(kind, int(number), float(steady_sec), state_dir=Path(state_dir[0]) if state_dir else None)
    Path(output).write_text(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
