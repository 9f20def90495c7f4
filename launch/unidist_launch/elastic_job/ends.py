"""Ends of workers of an elastic job: their consequences, and the decision to give the job up."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

from unidist.jobs.processes import describe_exit
from unidist_launch.elastic_job.parts import ElasticParts
from unidist_launch.elastic_job.workers import StartedWorker
from unidist_launch.remote.failure import RankExit

_USEFUL_SEC = 10.0
_LEFT_PAUSE_SEC = 30.0


class WorkerEnds:
    """Deals with the ends of workers.

    Args:
        parts: of the job.

    Attributes:
        verdict: why the job was given up; "" if it was not.
    """

    def __init__(self, parts: ElasticParts) -> None:
        self._parts = parts
        self._round = 0
        self.verdict = ""

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

    def give_up(self, text: str) -> None:
        """End the job, and blame what failed first since something was achieved."""
        parts = self._parts
        if parts.ending.has_begun or self.verdict:
            return
        self.verdict = f"the job has ended: {text}"
        parts.log.publish("give_up", reason=text)
        parts.ending.exits += [replace(end, signalled=False) for end in parts.patience.failures]
        if not parts.workers or not parts.patience.failures:
            parts.ending.begin(signal.SIGTERM)

    def _finish(self) -> None:
        """The script has come to its end on a rank: those that were never in a world have come too late."""
        parts = self._parts
        parts.is_finishing = True
        for worker in parts.workers:
            if worker.joined is None and not worker.is_leaving:
                worker.is_leaving = True
                parts.signal_worker(worker.number, worker.host, signal.SIGTERM)

    def _note_failure(self, worker: StartedWorker, returncode: int, host_lost: str, now: float) -> None:
        parts = self._parts
        was_useful = worker.joined is not None and now - worker.joined >= _USEFUL_SEC
        tail = parts.output.stderr_tail(worker.seat)
        end = RankExit(
            worker.seat,
            worker.pid,
            returncode,
            self._round,
            tail,
            signalled=parts.ending.has_begun,
            host_lost=host_lost,
        )
        slot = parts.slots.failed(worker.number, now, was_useful=was_useful or bool(host_lost))
        if parts.ending.has_begun:
            parts.ending.exits.append(end)
            return
        impatient = parts.patience.failed(end)
        if parts.is_finishing:
            parts.ending.exits.append(end)
        elif slot is not None and slot.is_given_up and not slot.is_gone:
            parts.log.publish("slot_given_up", host=slot.host, slot=slot.number, failures=slot.failures)
        if impatient:
            self.give_up(impatient)
        elif parts.discovery is None and parts.slots.num_usable < parts.limits.min_num:
            self.give_up(
                f"{parts.slots.num_usable} slots are left that have not failed again and again, and --min-np is "
                f"{parts.limits.min_num}"
            )
