"""The status of a job, built from its events, progress reports and, in an elastic job, heartbeats. Pure.

`JobStatus.as_fields` is the answer to `/status.json`, which the page, `unidist top` and `/metrics` show.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidist.control.messages import StepTimeReport
from unidist.launcher import ObservedWorker
from unidist_launch.elastic_job.report import event_line
from unidist_status.progress import NUM_CURVES, History, ProgressReport, ProgressWindow
from unidist_status.recovery import RecoveryWatch
from unidist_status.step_times import StepTimeWindow
from unidist_status.stragglers import StragglerWatch

NUM_EVENTS = 100
NUM_LINES = 200
NUM_ENDED = 8
_MAX_LINE_BYTES = 4000
_NUM_VALUES_IN_LINE = 2

Fields = dict[str, Any]


@dataclass
class _Worker:
    """A process of the job; `rank` is its rank now, or the one that it had."""

    number: int
    host: int
    host_name: str
    seat: int = -1
    pid: int = 0
    rank: int | None = None
    state: str = "starting"
    is_asked_to_leave: bool = False
    has_trained: bool = False
    heard: float | None = None
    reason: str = ""
    window: StepTimeWindow = field(default_factory=StepTimeWindow)
    progress: ProgressWindow = field(default_factory=ProgressWindow)
    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=NUM_LINES))


@dataclass
class _Host:
    name: str
    address: str
    cores: int
    state: str = "up"


class JobStatus:
    """The state of one job.

    Args:
        command: what it runs.
        num_proc: ranks at the beginning.
        is_elastic: ranks may come and go.
        now: time on the clock of all `now`, a monotonic one.
        time: the same in seconds since the epoch, as are all `time`.
    """

    def __init__(self, command: list[str], num_proc: int, *, is_elastic: bool = True, now: float, time: float) -> None:
        self._command = command
        self._is_elastic = is_elastic
        self._history = History()
        self._num_proc = num_proc
        self._began, self._time = now, time
        self._workers: dict[int, _Worker] = {}
        self._ended: deque[_Worker] = deque(maxlen=NUM_ENDED)
        self._hosts: dict[int, _Host] = {}
        self._events: deque[Fields] = deque(maxlen=NUM_EVENTS)
        self._counts: dict[str, int] = {}
        self._state = "starting"
        self._generation = -1
        self._members: list[int] = []
        self._progress = 0
        self._exit_code: int | None = None
        self._evaluation: Fields | None = None
        self._recovery = RecoveryWatch()
        self._stragglers = StragglerWatch()

    # What comes in

    def happened(self, event: str, fields: Mapping[str, Any], *, now: float, time: float) -> None:
        """Take an event of the job's log."""
        self._counts[event] = self._counts.get(event, 0) + 1
        self._events.append({"time": round(time, 3), "event": event, "text": _text(event, fields)})
        take = getattr(self, f"_on_{event}", None)
        if take is not None:
            take(fields, now)

    def take_over(self, generation: int, processes: Sequence[ObservedWorker]) -> None:
        """Go on with the job of a launcher that has died. Before anything happens.

        Args:
            generation: of the last world; -1: there was none.
            processes: that ran when it died.
        """
        self._generation = generation
        for each in processes:
            state = "waiting" if each.rank is None else "training"
            self._workers[each.number] = _Worker(
                each.number, each.host, each.host_name, each.seat, each.pid, each.rank, state
            )
        ranked = sorted((each.rank, each.number) for each in processes if each.rank is not None)
        self._members = [number for _, number in ranked]
        if ranked:
            self._state = "training"

    def beat(self, number: int, told: Mapping[str, Any], *, now: float) -> list[tuple[str, Fields]]:
        """Take what a worker's beat tells; returns events that are to be published."""
        worker = self._workers.get(number)
        if worker is None:
            return []
        worker.heard = now
        report = StepTimeReport(**told)
        worker.has_trained = worker.has_trained or report.generation >= 0
        if report.generation != self._generation or worker.state != "training":
            return []
        before = worker.window.last
        worker.window.add(report, now)
        self._progress = max(self._progress, report.progress)
        found: list[tuple[str, Fields]] = []
        if self._recovery.reported(number, report):
            assert self._recovery.last is not None
            found.append(("recovered", self._recovery.last.as_fields()))
        if worker.window.last is not before:
            found += self._look_for_stragglers()
        return found

    def progressed(self, number: int, told: Mapping[str, Any], *, now: float) -> None:
        """Take a worker's progress report."""
        worker = self._workers.get(number)
        report = ProgressReport.read(told)
        if worker is None or report is None:
            return
        worker.has_trained = worker.has_trained or not self._is_elastic  # it has called `init()`
        worker.heard = now
        worker.progress.add(report, now)

    def turn(self, now: float) -> None:
        """Add a point to the curves when it is time."""
        elapsed = now - self._began
        if self._state == "training" and self._history.is_due(elapsed) and self._has_rates():
            self._history.add({"elapsed_sec": round(elapsed, 1), **self._point(now)})

    def printed(self, seat: int, lines: Sequence[bytes]) -> None:
        """Take whole lines that the worker of a seat has printed, on either stream."""
        for worker in self._workers.values():
            if worker.seat == seat:
                worker.lines.extend(each[:_MAX_LINE_BYTES] for each in lines[-NUM_LINES:])
                return

    # What can be asked

    def find(self, name: str) -> int | None:
        """Return the number of a running worker: "3" is that of rank 3 now, "w7" worker 7 whatever its rank."""
        if name.startswith("w") and name[1:].isascii() and name[1:].isdigit() and len(name) < 12:
            number = int(name[1:])
            return number if number in self._workers else None
        if name.isascii() and name.isdigit() and len(name) < 12 and int(name) < len(self._members):
            number = self._members[int(name)]
            return number if number in self._workers else None
        return None

    def shows_stacks(self, number: int) -> bool:
        """Return whether a running worker is far enough to show its stacks; the signal would end it before."""
        return self._workers[number].has_trained

    def rank_of(self, number: int) -> int | None:
        """Return the rank of a running worker that has one."""
        worker = self._workers.get(number)
        return worker.rank if worker is not None and number in self._members else None

    def lines_of(self, name: str) -> list[str] | None:
        """Return the last lines of a worker, one that has ended not long ago included; None if there is none."""
        number = self.find(name)
        known = [*self._workers.values(), *self._ended]
        worker = next((each for each in known if each.number == number or f"w{each.number}" == name), None)
        if worker is None:
            return None
        return [each.decode(errors="replace") for each in worker.lines]

    def as_fields(self, *, now: float) -> Fields:
        """Return all of it as plain data."""
        commits, updates = self._rates(now)
        straggler = self._stragglers.current
        recovery = self._recovery.last
        return {
            "command": self._command,
            "title": title_of(self._command),
            "is_elastic": self._is_elastic,
            "num_proc": self._num_proc,
            "began": round(self._time, 3),
            "elapsed_sec": round(now - self._began, 3),
            "state": self._state,
            "exit_code": self._exit_code,
            "generation": self._generation,
            "world_size": len(self._members),
            "commits": self._progress,
            "commits_per_sec": round(commits, 4),
            "updates_per_sec": round(updates, 4),
            "steps": self._steps(),
            **{name: value for name, value in self._point(now).items() if name != "waiting"},
            "history": self._history.points,
            "ranks": [self._worker_fields(worker, now) for worker in self._ordered()],
            "ended": [
                {**self._worker_fields(worker, now), "reason": worker.reason} for worker in reversed(self._ended)
            ],
            "hosts": [
                {
                    "name": host.name,
                    "address": host.address,
                    "cores": host.cores,
                    "state": host.state,
                    "processes": sum(worker.host == index for worker in self._workers.values()),
                }
                for index, host in self._hosts.items()
            ],
            "events": list(self._events),
            "event_counts": dict(self._counts),
            "evaluation": self._evaluation,
            "num_changes": self._recovery.num,
            "recovery": None if recovery is None else recovery.as_fields(),
            "straggler": None
            if straggler is None
            else {
                "worker": straggler.worker,
                "rank": self.rank_of(straggler.worker),
                "own_sec": round(straggler.own_sec, 6),
                "others_sec": round(straggler.others_sec, 6),
                "factor": round(straggler.factor, 2),
            },
        }

    @property
    def exit_code(self) -> int | None:
        """That of the job; None while it runs."""
        return self._exit_code

    def figures(self, *, now: float) -> tuple[int | None, dict[str, float]]:
        """Return the steps so far (None: none was told), and finite figures of the job by name, for a record.

        Values that scripts report have the script's names; `unidist_track.Tracker.log` lists the others.
        """
        point = self._point(now)
        waiting = [rate for rate in point["waiting"] if rate is not None]
        found: dict[str, float] = {name: value for name, value in point["values"].items() if isinstance(value, float)}
        found |= {
            "steps_per_sec": point["steps_per_sec"],
            "samples_per_sec": point["samples_per_sec"],
            "waiting": statistics.fmean(waiting) if waiting else 0.0,
            "reading": point["reading"],
            "memory_bytes": float(point["memory_bytes"]),
            "world_size": float(len(self._members)),
            "generation": float(self._generation),
            "recoveries": float(self._recovery.num),
        }
        return self._steps(), found

    def summary(self, *, now: float) -> str:
        """Return the job in a few words, for a status line."""
        if self._generation < 0:
            return f"{len(self._workers)} of {self._num_proc} processes, {self._state}"
        told = self._progress_in_words(now)
        if not self._is_elastic:
            return f"{len(self._members)} ranks  {told}" if told else ""
        commits, _ = self._rates(now)
        rate = f"  {commits:.3g} commits/s" if commits else ""
        return (
            f"generation {self._generation}  {len(self._members)} ranks {self._state}  commit {self._progress}{rate}"
            + (f"  {told}" if told else "")
        )

    def _progress_in_words(self, now: float) -> str:
        point, steps = self._point(now), self._steps()
        if steps is None:
            return ""
        words = [f"step {steps}", f"{point['steps_per_sec']:.3g} steps/s"]
        if point["samples_per_sec"]:
            words.append(f"{point['samples_per_sec']:.3g} samples/s")
        words += [f"{name} {float(value):.4g}" for name, value in list(point["values"].items())[:_NUM_VALUES_IN_LINE]]
        return "  ".join(words)

    def _members_in_order(self) -> list[_Worker]:
        return [self._workers[number] for number in self._members if number in self._workers]

    def _steps(self) -> int | None:
        """Return the steps of the rank that has told most; None while none has told any."""
        reports = [worker.progress.last for worker in self._members_in_order()]
        return max((report.steps for report in reports if report is not None), default=None)

    def _has_rates(self) -> bool:
        return any(worker.progress.has_rates for worker in self._members_in_order())

    def _point(self, now: float) -> Fields:
        """Return the present figures, as plain data."""
        members = self._members_in_order()
        told = [worker for worker in members if worker.progress.last is not None]
        rates = [worker.progress.rates(now) for worker in told]
        values: dict[str, list[float]] = {}
        for worker in told:
            assert worker.progress.last is not None
            for name, value in worker.progress.last.values.items():
                values.setdefault(name, []).append(value)
        memory = [worker.progress.last.memory_bytes for worker in told if worker.progress.last is not None]
        return {
            "steps_per_sec": round(statistics.median(rate.steps_per_sec for rate in rates), 4) if rates else 0.0,
            "samples_per_sec": round(sum(rate.samples_per_sec for rate in rates), 2),
            "values": {name: _plain(statistics.fmean(given)) for name, given in values.items()},
            "memory_bytes": max(memory, default=0),
            "reading": round(statistics.fmean(rate.reading for rate in rates), 3) if rates else 0.0,
            "waiting": [
                None if worker.progress.last is None else round(worker.progress.rates(now).waiting, 3)
                for worker in members[:NUM_CURVES]
            ],
        }

    def _ordered(self) -> list[_Worker]:
        ranked = [self._workers[number] for number in self._members if number in self._workers]
        return ranked + [worker for number, worker in self._workers.items() if number not in self._members]

    def _rates(self, now: float) -> tuple[float, float]:
        rates = [self._workers[each].window.rates(now) for each in self._members if each in self._workers]
        if self._state != "training" or not rates:
            return 0.0, 0.0
        return statistics.median(rate[0] for rate in rates), statistics.median(rate[1] for rate in rates)

    def _worker_fields(self, worker: _Worker, now: float) -> Fields:
        times = worker.window.times()
        report, progress = worker.window.last, worker.progress.last
        state = "leaving" if worker.is_asked_to_leave and worker.state == "training" else worker.state
        return {
            "rank": worker.rank,
            "worker": worker.number,
            "seat": worker.seat,
            "host": worker.host_name,
            "pid": worker.pid,
            "state": state,
            "commits": None if report is None else report.progress,
            "updates": None if report is None else report.updates,
            "commits_per_sec": round(worker.window.rates(now)[0], 4),
            "own_sec": None if times is None else round(times.own_sec, 6),
            "waited_sec": None if times is None else round(times.waited_sec, 6),
            "steps": None if progress is None else progress.steps,
            "waiting": None if progress is None else round(worker.progress.rates(now).waiting, 3),
            "reading": None if progress is None else round(worker.progress.rates(now).reading, 3),
            "memory_bytes": None if progress is None else progress.memory_bytes,
            "heard_sec": None if worker.heard is None else round(now - worker.heard, 3),
            "shows_stacks": worker.has_trained and worker.state != "ended",
        }

    def _look_for_stragglers(self) -> list[tuple[str, Fields]]:
        members = [self._workers[number] for number in self._members if number in self._workers]
        named = self._stragglers.update({each.number: each.window.times() for each in members})
        if named is None:
            return []
        fields = {
            "worker": named.worker,
            "rank": self.rank_of(named.worker),
            "generation": self._generation,
            "own_sec": round(named.own_sec, 6),
            "others_sec": round(named.others_sec, 6),
        }
        return [("straggler", fields)]

    # Events, by name

    def _on_host_joined(self, fields: Fields, now: float) -> None:
        name = fields["host"]
        self._hosts = {index: host for index, host in self._hosts.items() if host.name != name}  # its earlier agents
        self._hosts[int(fields["index"])] = _Host(name, fields["address"], int(fields["cores"]))

    def _on_host_lost(self, fields: Fields, now: float) -> None:
        self._set_host(fields["host"], "lost")

    def _on_host_terminating(self, fields: Fields, now: float) -> None:
        self._set_host(fields["host"], "leaving")

    def _set_host(self, name: str, state: str) -> None:
        for host in self._hosts.values():
            if host.name == name:
                host.state = state

    def _on_started(self, fields: Fields, now: float) -> None:
        number = int(fields["worker"])
        index = int(fields["host"])
        host = self._hosts.get(index)
        self._workers[number] = _Worker(number, index, host.name if host is not None else "?")

    def _on_process(self, fields: Fields, now: float) -> None:
        worker = self._workers.get(int(fields["worker"]))
        if worker is not None:
            worker.seat, worker.pid = int(fields["seat"]), int(fields["pid"])

    def _on_joined(self, fields: Fields, now: float) -> None:
        worker = self._workers.get(int(fields["worker"]))
        if worker is not None:
            worker.state, worker.heard = "waiting", now

    def _on_generation(self, fields: Fields, now: float) -> None:
        self._generation = int(fields["generation"])
        self._members = [int(number) for number in fields["workers"]]
        self._progress = max(self._progress, int(fields["progress"]))
        self._state = "training"
        self._stragglers.reset()
        self._recovery.formed(self._generation, list(self._members), now)
        for rank, number in enumerate(self._members):
            worker = self._workers.get(number)
            if worker is not None:
                worker.rank, worker.state, worker.window = rank, "training", StepTimeWindow()

    def _on_change(self, fields: Fields, now: float) -> None:
        self._recovery.changes("ranks come or go", now)

    def _on_ended(self, fields: Fields, now: float) -> None:
        self._recovery.changes(str(fields["text"]), now)
        self._state = "re-forming"
        for worker in self._workers.values():
            if worker.state == "training":
                worker.state = "re-forming"

    def _on_lost(self, fields: Fields, now: float) -> None:
        worker = self._workers.get(int(fields["worker"]))
        heard = None if worker is None else worker.heard
        self._recovery.lost(f"rank {fields['rank']} was lost: {fields['reason']}", now, heard)
        if worker is not None:
            worker.state = "lost"

    def _on_leaving(self, fields: Fields, now: float) -> None:
        worker = self._workers.get(int(fields["worker"]))
        if worker is not None:
            worker.is_asked_to_leave = True

    def _on_left(self, fields: Fields, now: float) -> None:
        worker = self._workers.get(int(fields["worker"]))
        if worker is not None:
            worker.state = "left"

    def _on_short(self, fields: Fields, now: float) -> None:
        self._state = "waiting for processes"

    def _on_enough(self, fields: Fields, now: float) -> None:
        if self._state == "waiting for processes":
            self._state = "re-forming"

    def _on_exit(self, fields: Fields, now: float) -> None:
        worker = self._workers.pop(int(fields["worker"]), None)
        if worker is not None:
            worker.state, worker.reason = "ended", str(fields["reason"])
            self._ended.append(worker)

    def _on_finished(self, fields: Fields, now: float) -> None:
        self._state = "finishing"

    def _on_give_up(self, fields: Fields, now: float) -> None:
        self._state = "giving up"

    def _on_evaluated(self, fields: Fields, now: float) -> None:
        self._evaluation = {"step": fields["step"], "values": dict(fields["values"])}

    def _on_end(self, fields: Fields, now: float) -> None:
        self._state, self._exit_code = "ended", int(fields["exit_code"])


def title_of(command: Sequence[str]) -> str:
    """Return the name of the script or module that a command runs; else that of its program."""
    for i, word in enumerate(command):
        if word == "-m" and i + 1 < len(command):
            return command[i + 1]
        if word.endswith(".py"):
            return word.rpartition("/")[2]
    return command[0].rpartition("/")[2] if command else "?"


def _plain(value: float) -> float | str:
    """Return a number as JSON has it: others than finite ones as text."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _text(event: str, fields: Mapping[str, Any]) -> str:
    """Return an event in words: the launcher's own if it says something of it, else its fields."""
    return event_line(event, fields) or ", ".join(f"{name} {_short(value)}" for name, value in fields.items())


def _short(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 300 else text[:297] + "..."
