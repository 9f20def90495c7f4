"""The sample schedule: found by name, made like ours, and good for what it is made for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from unidist.runtime.plugin_manager import PluginManager
from unidist_pipeline.schedules.catalog import build_schedule
from unidist_pipeline.schedules.registration import ScheduleSpec
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import Simulation, simulate

ROOT = Path(__file__).resolve().parents[2]


def simulated(manager: PluginManager, name: str, message: float) -> Simulation:
    schedule = build_schedule(name, manager.registry(ScheduleSpec), num_ranks=4, num_microbatches=16)
    return simulate(schedule, Costs(message=message))


def test_it_is_shorter_than_1f1b_where_messages_are_slow_and_holds_more(manager: PluginManager) -> None:
    assert manager.registry(ScheduleSpec).origin_of("sample-eager") == "'sample' (unidist-sample-plugin)"
    quick, eager_quick = (simulated(manager, name, 0.0) for name in ("1f1b", "sample-eager"))
    slow, eager_slow = (simulated(manager, name, 1.0) for name in ("1f1b", "sample-eager"))
    assert eager_quick.makespan == quick.makespan
    assert eager_slow.makespan < slow.makespan - 8
    assert max(eager_slow.peak_activations) == 2 * max(slow.peak_activations) - 1


def test_the_command_draws_it_like_any_other(manager: PluginManager) -> None:
    arguments = ("pipeline", "show", "--schedule", "sample-eager", "--stages", "3", "--microbatches", "6", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "unidist_launch", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert figures["peak_activations"] == [5, 3, 1]
