"""Ends of workers of an elastic job: their consequences, and the decision to give the job up."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from unidist.jobs.processes import describe_exit
from unidist.launcher import Job
from unidist_launch.elastic_job.fallback import fallback_of
from unidist_launch.elastic_job.parts import ElasticParts
from unidist_launch.elastic_job.workers import StartedWorker
from unidist_launch.remote.failure import RankExit

_USEFUL_SEC = 10.0
"""A worker that fails later, counted from its start if it has made a commit, is no sign of a bad slot."""

_LAST_EXIT_SEC = 3.0
_LEFT_PAUSE_SEC = 30.0


class WorkerEnds:
    """Deals with the ends of workers.

    Args:
        parts: of the job.

    Attributes:
        verdict: why the job was given up; "" if it was not.
        fallback: the job that goes on instead, with another strategy; None: there is none.
    """

    def __init__(self, parts: ElasticParts) -> None:
        self._parts = parts
        self._round = 0
        self._members: set[int] = set()  # of the present world
        self._failed: dict[int, RankExit] = {}  # since it began, by worker
        self._blame_by: float | None = None
        self._num_newcomers_needed = 0
        self._has_finished = False
        self.verdict = ""
        self.fallback: Job | None = None

    def next_round(self) -> None:
        """Ends that are told from now on have come after those before."""
        self._round += 1

    def end_worker(self, number: int, returncode: int, *, host_lost: str = "") -> None:
        """A worker's process has ended, or its host was lost: say so, and see what follows from it."""
        parts = self._parts
        worker = parts.workers.remove(number)
        if worker is None:
            return
        now = time.monotonic()
        for stream, last in worker.last_bytes.items():
            if last != b"\n":  # the next worker of this seat begins a line of its own
                parts.output.feed(worker.seat, stream, b"\n")
        succeeded = not returncode and not worker.has_left
        reason = host_lost or describe_exit(returncode)
        fields = {"worker": number, "seat": worker.seat, "pid": worker.pid, "returncode": returncode, "reason": reason}
        parts.log.publish("exit", **fields)
        parts.server.call(
            lambda: parts.coordinator.end_worker(number, reason, now=time.monotonic(), succeeded=succeeded)
        )
        if succeeded:
            self._finish()
            parts.slots.vacated(number, now, pause=0.0)
        elif worker.has_left or (worker.is_leaving and not host_lost):
            parts.slots.vacated(number, now, pause=_LEFT_PAUSE_SEC)
        else:
            self._note_failure(worker, returncode, host_lost, now)
        parts.output.show_end(worker.seat)

    def world_began(self, members: Sequence[int], too_many: str) -> None:
        """A generation has begun, of these workers; `too_many`: why that is one too many, and the job is to end."""
        if too_many:
            # Those that have come to their end since the last one began, and were not asked to leave.
            gone = self._members - set(members)
            running = {worker.number for worker in self._parts.workers if not worker.is_leaving}
            failures = [end for number, end in self._failed.items() if number in gone]
            self._decide(too_many, failures, awaited=bool(gone & running))
        self._members = set(members)
        self._failed.clear()

    def give_up(self, text: str) -> None:
        """End the job, and blame what failed first since something was achieved."""
        self._decide(text, self._parts.patience.failures, awaited=False)

    def fall_short(self, text: str) -> None:
        """End a job that has too few processes, or start the fallback with the remaining ones."""
        parts = self._parts
        if parts.ending.has_begun or self.verdict or self.fallback is not None:
            return
        hosts = [host.name for host in parts.hosts.present()]
        self.fallback = fallback_of(parts.job, len(list(parts.workers)), hosts)
        if self.fallback is None:
            self.give_up(text)
            return
        strategy = self.fallback.env["UNIDIST_STRATEGY"]
        parts.log.publish("fallback", reason=text, num_proc=self.fallback.num_proc, strategy=strategy)
        parts.ending.begin(signal.SIGTERM)

    def is_short(self, num_newcomers_needed: int) -> None:
        """Those that wait cannot go on without so many workers that have no part of the model yet; 0: they can."""
        self._num_newcomers_needed = num_newcomers_needed
        if num_newcomers_needed:
            self._fall_short_of_slots()

    def turn(self, now: float) -> None:
        """End a job that was given up, if there is still nobody to blame."""
        ending = self._parts.ending
        if self._blame_by is not None and now >= self._blame_by and not ending.has_begun and not ending.exits:
            ending.begin(signal.SIGTERM)

    def _decide(self, text: str, failures: Sequence[RankExit], *, awaited: bool) -> None:
        """Give the job up; `awaited`: the end of the process to blame is still to come."""
        parts = self._parts
        if parts.ending.has_begun or self.verdict:
            return
        self.verdict = f"the job has ended: {text}"
        parts.log.publish("give_up", reason=text)
        parts.ending.exits += [replace(end, signalled=False) for end in failures]
        if awaited:
            self._blame_by = time.monotonic() + _LAST_EXIT_SEC
        elif not parts.workers or not failures:
            parts.ending.begin(signal.SIGTERM)

    def _finish(self) -> None:
        """The script has come to its end on a rank: those that were never in a world have come too late."""
        parts = self._parts
        parts.is_finishing = True
        if self._has_finished:
            return  # nothing was started since
        self._has_finished = True
        for worker in parts.workers:
            if worker.joined is None and not worker.is_leaving:
                worker.is_leaving = True
                worker.kill_at = time.monotonic() + parts.job.grace_period.total_seconds()
                parts.signal_worker(worker.number, worker.host, signal.SIGTERM)

    def _note_failure(self, worker: StartedWorker, returncode: int, host_lost: str, now: float) -> None:
        parts = self._parts
        useful_since = worker.started if worker.num_commits else worker.joined
        was_useful = useful_since is not None and now - useful_since >= _USEFUL_SEC
        tail = parts.output.stderr_tail(worker.seat)
        end = RankExit(
            worker.seat,
            worker.pid,
            returncode,
            self._round,
            tail,
            signalled=parts.ending.has_begun,
            host_lost=host_lost,
            host=parts.host_names.get(worker.seat, ""),
        )
        if end.is_victim or end.signalled:
            parts.output.drop_end(worker.seat)
        self._failed[worker.number] = end
        slot = parts.slots.failed(worker.number, now, was_useful=was_useful or bool(host_lost))
        if parts.ending.has_begun or self.verdict:
            parts.ending.exits.append(end)
            return
        impatient = parts.patience.failed(end)
        if parts.is_finishing and not worker.is_hung:
            parts.ending.exits.append(end)
        elif slot is not None and slot.is_given_up and not slot.is_gone:
            parts.log.publish("slot_given_up", host=slot.host, slot=slot.number, failures=slot.failures)
        if impatient:
            self.give_up(impatient)
        else:
            self._fall_short_of_slots()

    def _fall_short_of_slots(self) -> None:
        """End the job if too few slots are left that have not failed again and again."""
        parts, needed = self._parts, self._num_newcomers_needed
        if parts.discovery is not None:
            return
        usable = parts.slots.num_usable
        if usable < parts.limits.min_ranks:
            self.fall_short(f"{usable} slots are left that have not failed again and again, and {parts.limits.needs}")
            return
        if not needed:
            return
        free = parts.slots.num_without({worker.number for worker in parts.workers if worker.joined is not None})
        if free < needed:
            self.fall_short(
                f"{needed} processes are missing that would have other parts of the model than those that are left, "
                f"and {free} slots are left for them that have not failed again and again; {parts.limits.needs}"
            )
