"""A job that reports a loss and steps, for the tests of trackers; it needs no framework."""

from __future__ import annotations

SCRIPT = """
from unidist.horovod_api import init, report, shutdown
from unidist.runtime import context

init()
for step in range(1, 9):
    context.current().step_applied(step)
    report(loss=1 / step, samples=4)
    time.sleep(0.2)
shutdown()
"""
NUM_STEPS = 8
LAST_LOSSES = (1 / 8, 1 / 6)
"""The mean over ranks, of which one may have told its last value when another has ended."""
NAMES = {
    "loss",
    "steps_per_sec",
    "samples_per_sec",
    "waiting",
    "reading",
    "memory_bytes",
    "world_size",
    "generation",
    "recoveries",
}
