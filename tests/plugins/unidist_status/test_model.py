"""What is to be seen of a job, from its events and beats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unidist.launcher import ObservedWorker
from unidist_status.model import NUM_ENDED, NUM_EVENTS, NUM_LINES, JobStatus


class Job:
    """A job that tells its status what happens, a tenth of a second after the other."""

    def __init__(self, ranks: int = 3) -> None:
        self.now = 50.0
        self.status = JobStatus(["train.py"], ranks, now=self.now, time=1000.0)
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.happens("job", command=["train.py"], num_proc=ranks)
        self.happens("host_joined", host="h1", index=0, address="10.0.0.1", cores=8)
        for number in range(ranks):
            self.start(number, number)
        self.form(0, *range(ranks))

    def happens(self, event: str, **fields: Any) -> None:
        self.now += 0.1
        self.status.happened(event, fields, now=self.now, time=950.0 + self.now)

    def start(self, number: int, seat: int) -> None:
        self.happens("started", worker=number, host=0)
        self.happens("process", worker=number, seat=seat, pid=1000 + number)
        self.happens("joined", worker=number, host=0)

    def form(self, generation: int, *workers: int, progress: int = 0) -> None:
        fields = {"generation": generation, "world_size": len(workers), "progress": progress}
        self.happens("generation", workers=list(workers), **fields)

    def beat(self, worker: int, generation: int, commits: int, **told: Any) -> None:
        told = {"generation": generation, "commits": commits, "timed": commits, "progress": commits, **told}
        self.found += self.status.beat(worker, told, now=self.now)

    @property
    def fields(self) -> dict[str, Any]:
        found = self.status.as_fields(now=self.now)
        json.dumps(found)  # it is all plain data
        return found

    def states(self) -> list[tuple[int | None, str]]:
        return [(rank["rank"], rank["state"]) for rank in self.fields["ranks"]]


def test_ranks_have_their_place_process_and_step_times() -> None:
    job = Job()
    for second in range(5):
        job.now += 1
        for worker in range(3):
            job.beat(worker, 0, 10 * second, own_sec=0.5 * second, waited_sec=0.25 * second, first_step_sec=1.0)
    found = job.fields
    assert (found["state"], found["generation"], found["world_size"], found["commits"]) == ("training", 0, 3, 40)
    assert found["commits_per_sec"] == pytest.approx(10.0)
    rank = found["ranks"][1]
    assert (rank["rank"], rank["worker"], rank["host"], rank["pid"], rank["state"]) == (1, 1, "h1", 1001, "training")
    assert (rank["own_sec"], rank["waited_sec"], rank["heard_sec"]) == (0.05, 0.025, 0.0)
    assert found["hosts"] == [{"name": "h1", "address": "10.0.0.1", "cores": 8, "state": "up", "processes": 3}]
    assert found["elapsed_sec"] == pytest.approx(job.now - 50.0)
    assert found["recovery"] is None
    assert job.found == []


def test_a_loss_is_followed_from_its_detection_to_the_first_step() -> None:
    job = Job()
    job.beat(1, 0, 5, first_step_sec=1.0)
    job.happens("lost", worker=1, rank=1, generation=0, reason="its connection ended")
    assert job.states() == [(0, "training"), (1, "lost"), (2, "training")]
    job.happens("ended", generation=0, text="rank 1 was lost")
    assert job.states() == [(0, "re-forming"), (1, "lost"), (2, "re-forming")]
    assert job.fields["state"] == "re-forming"
    job.happens("exit", worker=1, seat=1, pid=1001, returncode=-9, reason="killed by signal 9")
    job.form(1, 2, 0, progress=5)
    assert job.states() == [(0, "training"), (1, "training")]
    assert [rank["worker"] for rank in job.fields["ranks"]] == [2, 0]
    assert [(each["rank"], each["reason"]) for each in job.fields["ended"]] == [(1, "killed by signal 9")]
    for worker in (0, 2):
        job.beat(worker, 1, 7, restore_sec=0.4, first_step_sec=0.1 * worker)
    assert [event for event, _ in job.found] == ["recovered"]
    recovery = job.fields["recovery"]
    assert recovery == job.found[0][1]
    assert recovery["is_complete"]
    assert recovery["detect_sec"] == pytest.approx(0.1)
    assert recovery["reform_sec"] == pytest.approx(0.3)
    assert (recovery["restore_sec"], recovery["first_step_sec"]) == (0.4, 0.2)
    assert job.fields["num_changes"] == 1


def test_a_slow_rank_is_told_of_and_shown_until_the_ranks_change() -> None:
    job = Job()
    for second in range(4):
        job.now += 1
        for worker in range(3):
            own = 0.3 if worker == 2 else 0.1
            job.beat(worker, 0, 10 * second, own_sec=10 * second * own, first_step_sec=1.0)
    assert [event for event, _ in job.found] == ["straggler"]
    assert job.found[0][1] == {"worker": 2, "rank": 2, "generation": 0, "own_sec": 0.3, "others_sec": 0.1}
    slow = job.fields["straggler"]
    assert (slow["rank"], slow["factor"]) == (2, 3.0)
    job.happens("change", generation=0)
    job.form(1, 2, 0, 1)
    assert job.fields["straggler"] is None


def test_ranks_are_found_by_rank_or_worker_and_nothing_else_is() -> None:
    job = Job()
    job.happens("exit", worker=0, seat=0, pid=1000, returncode=1, reason="exit code 1")
    job.form(1, 2, 1)
    job.start(3, 0)
    assert [job.status.find(name) for name in ("0", "1", "w1", "w2", "w3")] == [2, 1, 1, 2, 3]
    assert job.status.rank_of(3) is None
    for name in ("2", "-1", "w0", "w", "", "x", "0x1", "1e9", "9" * 50, "w" + "9" * 50, "²", "w²", "../etc"):
        assert job.status.find(name) is None, name


def test_logs_are_of_the_worker_in_the_seat_and_are_kept_for_a_while() -> None:
    job = Job()
    job.status.printed(1, [b"first", b"caf\xc3\xa9 \xff"])
    job.happens("exit", worker=1, seat=1, pid=1001, returncode=1, reason="exit code 1")
    job.start(3, 1)
    job.status.printed(1, [b"line %d" % i for i in range(5000)])
    assert job.status.lines_of("w1") == ["first", "café \ufffd"]
    job.form(1, 0, 3, 2)
    lines = job.status.lines_of("1")
    assert lines is not None
    assert (len(lines), lines[-1]) == (NUM_LINES, "line 4999")
    assert job.status.lines_of("7") is None


def test_what_is_kept_is_bounded() -> None:
    job = Job(ranks=1)
    for number in range(1, 200):
        job.start(number, 1)
        job.status.printed(1, [b"x" * 1_000_000])
        job.happens("exit", worker=number, seat=1, pid=1, returncode=1, reason="exit code 1")
    found = job.fields
    assert (len(found["ended"]), len(found["events"])) == (NUM_ENDED, NUM_EVENTS)
    assert found["event_counts"]["exit"] == 199
    assert len(json.dumps(found)) < 100_000
    lines = job.status.lines_of("w199")
    assert lines is not None
    assert len(lines[0]) < 10_000


def test_only_a_process_that_trains_is_asked_for_its_stacks() -> None:
    job = Job()
    assert not job.status.shows_stacks(0)  # the signal would end it before `init()`
    job.beat(0, 0, 1)
    assert job.status.shows_stacks(0)


def test_nonsense_from_a_worker_changes_nothing() -> None:
    job = Job()
    job.beat(99, 0, 1)
    job.beat(0, 7, 1000)
    assert job.fields["commits"] == 0
    assert job.found == []


def test_the_summary_says_how_far_the_job_is() -> None:
    job = Job()
    for second in range(3):
        job.now += 1
        job.beat(0, 0, 10 * second)
        job.beat(1, 0, 10 * second)
        job.beat(2, 0, 10 * second)
    assert job.status.summary(now=job.now) == "generation 0  3 ranks training  commit 20  10 commits/s"
    early = JobStatus(["x"], 4, now=0.0, time=0.0)
    assert early.summary(now=0.0) == "0 of 4 processes, starting"


def test_a_host_that_is_lost_and_comes_back_is_listed_once_more() -> None:
    job = Job()
    job.happens("host_lost", host="h1", reason="silence")
    assert [host["state"] for host in job.fields["hosts"]] == ["lost"]
    job.happens("host_joined", host="h1", index=1, address="10.0.0.1", cores=8)
    assert [host["state"] for host in job.fields["hosts"]] == ["up"]


def test_another_launchers_processes_are_shown_with_their_ranks() -> None:
    status = JobStatus(["train.py"], 3, now=0.0, time=0.0)
    processes = [(4, 1, 400), (2, 0, 200), (7, None, 700)]
    status.take_over(5, [ObservedWorker(number, 0, "h1", number, pid, rank) for number, rank, pid in processes])
    status.beat(4, {"generation": 5, "commits": 3, "progress": 90}, now=1.0)
    found = status.as_fields(now=1.0)
    assert (found["state"], found["generation"], found["world_size"], found["commits"]) == ("training", 5, 2, 90)
    assert [(each["rank"], each["pid"], each["state"]) for each in found["ranks"]] == [
        (0, 200, "training"),
        (1, 400, "training"),
        (None, 700, "waiting"),
    ]
    assert [status.find(name) for name in ("0", "1", "2", "w7")] == [2, 4, None, 7]
