"""What happens to a job of simulated workers, and what of it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.control_plane.simulator import usage
from benchmarks.control_plane.simulators import Simulators, Totals

STEADY_SEC = 5.0
_GIVE_UP_SEC = 240.0
_LOOK_SEC = 0.3


@dataclass
class Observed:
    """What an observer of the job has been told, with times."""

    last: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, tuple[float, int]] = field(default_factory=dict)  # by generation
    num_beats: int = 0

    def happened(self, event: str, fields: Mapping[str, Any], now: float) -> None:
        """Note an event."""
        self.last[event] = now
        self.counts[event] = self.counts.get(event, 0) + 1
        if event == "generation":
            self.sizes[int(fields["generation"])] = now, int(fields["world_size"])


@dataclass
class Figures:
    """What was measured of one job. Times in seconds.

    Args:
        num_workers: of the job.
        hosts_joined: from the launcher's start until all agents were there.
        formed: until every worker had a place in the first generation.
        met: until every worker had met all others there, in all rounds of `meet`.
        noticed: from the end of one worker until the last of the others knew that its generation has ended.
        reformed: until every other worker had met the others of the next generation.
        whole: until there were as many workers as before.
        crowd: number of workers that were killed in the same instant.
        crowd_noticed: as `noticed`, for these.
        crowd_reformed: as `reformed`.
        form_cpu: processor time of the launcher until `met`, per worker.
        steady_cpu: processor time of the launcher while all train, per worker and second.
        memory: of the launcher when all have met, less before, in bytes per worker.
        worker_form_cpu: processor time of simulated hosts and workers until `met`, per worker.
        worker_steady_cpu: the same while all train, per worker and second.
        beats: heartbeats that the launcher got while all trained, per worker and second.
        exchanged: in which every rank told every other its address.
        exchange_cpu: processor time of the launcher for it, per worker.
        worker_exchange_cpu: the same of simulated hosts and workers.
    """

    num_workers: int
    hosts_joined: float = 0.0
    formed: float = 0.0
    met: float = 0.0
    noticed: float = 0.0
    reformed: float = 0.0
    whole: float = 0.0
    crowd: int = 0
    crowd_noticed: float = 0.0
    crowd_reformed: float = 0.0
    form_cpu: float = 0.0
    steady_cpu: float = 0.0
    memory: float = 0.0
    worker_form_cpu: float = 0.0
    worker_steady_cpu: float = 0.0
    beats: float = 0.0
    exchanged: float = 0.0
    exchange_cpu: float = 0.0
    worker_exchange_cpu: float = 0.0


class _Clock:
    """Measures the launcher's and the simulators' use of the machine between two points."""

    def __init__(self, num_workers: int, simulators: Simulators) -> None:
        self._num_workers, self._simulators = num_workers, simulators
        self.restart()

    def restart(self) -> None:
        """Begin a period."""
        self._own, self._theirs, self.at = usage(), self._simulators.totals().cpu, time.monotonic()

    def read(self) -> tuple[float, float, float]:
        """Return the processor time of the launcher and of the others per worker, and the launcher's memory."""
        own, theirs = usage(), self._simulators.totals().cpu
        used = own["cpu"] - self._own["cpu"], theirs - self._theirs, own["resident"] - self._own["resident"]
        return used[0] / self._num_workers, used[1] / self._num_workers, used[2] / self._num_workers


def elastic_scenario(num_workers: int, steady_sec: float, simulators: Simulators, observed: Observed) -> Figures:
    """A world forms, trains, loses one worker, gets a new one, and loses all of a simulator at once."""
    figures = Figures(num_workers)
    clock = _Clock(num_workers, simulators)
    begin = clock.at
    totals = _until(simulators, lambda totals: _count(totals.met, 0) == num_workers)
    figures.form_cpu, figures.worker_form_cpu, figures.memory = clock.read()
    figures.hosts_joined = observed.last["host_joined"] - begin
    figures.formed, figures.met = totals.assigned[0][1] - begin, totals.met[0][1] - begin
    _train(figures, steady_sec, clock, observed)

    generation, killed_at = max(observed.sizes), time.monotonic()
    simulators.end_worker(num_workers // 2)
    totals = _until(simulators, lambda totals: _is_reformed(totals, observed, generation + 1, num_workers - 1))
    figures.noticed = totals.ended[generation][1] - killed_at
    figures.reformed = _first_whole(totals, observed, generation + 1)[1] - killed_at
    totals = _until(simulators, lambda totals: _is_reformed(totals, observed, generation + 1, num_workers))
    figures.whole = max(last for _, last in totals.met.values()) - killed_at

    generation = max(observed.sizes)
    killed_at = time.monotonic()
    simulators.kill_one()
    totals = _until(simulators, lambda totals: _is_reformed(totals, observed, generation + 1))
    first, figures.crowd_reformed = _first_whole(totals, observed, generation + 1)
    figures.crowd = num_workers - observed.sizes[first][1]
    figures.crowd_noticed = totals.ended[generation][1] - killed_at
    figures.crowd_reformed -= killed_at
    return figures


def fixed_scenario(num_workers: int, steady_sec: float, simulators: Simulators, observed: Observed) -> Figures:
    """All ranks meet, train, and one of them dies: the others are ended."""
    figures = Figures(num_workers)
    clock = _Clock(num_workers, simulators)
    begin = clock.at
    totals = _until(simulators, lambda totals: _count(totals.met, 0) == num_workers)
    figures.form_cpu, figures.worker_form_cpu, figures.memory = clock.read()
    figures.hosts_joined = observed.last.get("host_joined", begin) - begin
    figures.met = totals.met[0][1] - begin
    _train(figures, steady_sec, clock, observed)
    clock.restart()
    simulators.exchange()
    totals = _until(simulators, lambda totals: _count(totals.exchanged, 0) == num_workers)
    figures.exchange_cpu, figures.worker_exchange_cpu, _ = clock.read()
    figures.exchanged = totals.exchanged[0][1] - clock.at
    killed_at = time.monotonic()
    simulators.end_worker(num_workers // 2)
    totals = _until(simulators, lambda totals: totals.signalled[0] >= num_workers - 1)
    figures.noticed = totals.signalled[1] - killed_at
    return figures


def _train(figures: Figures, steady_sec: float, clock: _Clock, observed: Observed) -> None:
    clock.restart()
    beats = observed.num_beats
    time.sleep(steady_sec)
    seconds = time.monotonic() - clock.at
    own, theirs, _ = clock.read()
    figures.steady_cpu, figures.worker_steady_cpu = own / seconds, theirs / seconds
    figures.beats = (observed.num_beats - beats) / seconds / figures.num_workers


def _count(times: dict[int, tuple[int, float]], generation: int) -> int:
    return times.get(generation, (0, 0.0))[0]


def _first_whole(totals: Totals, observed: Observed, first: int, at_least: int = 0) -> tuple[int, float]:
    """Return the first generation from `first` on whose members have all met, and when; (-1, 0.0): none yet."""
    for generation, (_, size) in sorted(observed.sizes.items()):
        count, last = totals.met.get(generation, (0, 0.0))
        if generation >= first and size >= at_least and count == size:
            return generation, last
    return -1, 0.0


def _is_reformed(totals: Totals, observed: Observed, first: int, at_least: int = 0) -> bool:
    return _first_whole(totals, observed, first, at_least)[0] >= 0


def _until(simulators: Simulators, condition: Callable[[Totals], bool]) -> Totals:
    """Wait for a condition; the times that are reported are those that workers have noted."""
    deadline = time.monotonic() + _GIVE_UP_SEC
    while True:
        totals = simulators.totals()
        if condition(totals):
            return totals
        if time.monotonic() > deadline:
            raise TimeoutError(f"the workers did not come there in {_GIVE_UP_SEC:g} s: {totals}")
        time.sleep(_LOOK_SEC)
