"""Elastic jobs whose launcher is killed and started again: real processes of this host."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from elastic_job import ElasticJob, script, total
from unidist_command import Command

Start = Callable[..., ElasticJob]
ENDLESS = 1_000_000


@pytest.fixture
def start(command: Command) -> Start:
    """Start a launcher of the job in the folder "state": the first one, and those that come after it."""
    name = command.script(script())
    events = command.folder / "events.jsonl"

    def launch(*options: str, steps: int = ENDLESS, **env: str) -> ElasticJob:
        given = ("-np", "3", "--min-np", "2", "--state-dir", "state", "--event-log", str(events), *options)
        return ElasticJob(command.start("launch", *given, sys.executable, name, str(steps), "0.02", env=env), events)

    return launch


def kill(job: ElasticJob) -> None:
    job.process.kill()
    job.process.wait()


def stop(command: Command, job: ElasticJob) -> None:
    """Have the script end, and check that it ends well and did not lose or double a step."""
    (command.folder / "stop").touch()
    assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}


def times(job: ElasticJob) -> list[float]:
    """Return when rank 0 took its steps, as far as it has told this launcher."""
    return [float(at) for (at,) in job.said(r"step \d+ 0 \d+ (\S+)")]


def workers(command: Command) -> set[int]:
    """Return the processes of the script."""
    found = set()
    for process in command.alive():
        try:
            if "script.py" in process.cmdline() and "unidist_launch" not in process.cmdline():
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def test_ranks_go_on_while_the_launcher_is_away_and_keep_their_processes(start: Start, command: Command) -> None:
    with start() as first:
        pids = {first.pid(rank, 3) for rank in range(3)}
        before = int(first.wait_for(r"step (\d+) 0 .*")[0])
        second = command.run("launch", "-np", "3", "--min-np", "2", "--state-dir", "state", "true")
        assert second.returncode == 2
        assert f"whose launcher runs (process {first.process.pid})" in second.stderr
        kill(first)
        gone = time.time()
        assert workers(command) == pids
    other = command.run("launch", "-np", "3", "--min-np", "2", "--state-dir", "state", "true")
    assert other.returncode == 2
    assert "by the same command" in other.stderr
    with start() as job:
        back = job.wait_for(r"step (\d+) 0 .*")
        resumed = job.events("resumed")[0]["time"]
        assert command.wait_until(lambda: any(at > resumed for at in times(job)), 60), job.lines
        assert workers(command) == pids
        stop(command, job)
    assert int(back[0]) > before
    # Steps were taken after the launcher had died and before another was there.
    assert any(gone < at < resumed for at in times(job))
    assert job.survivors() == pids
    assert len(job.events("generation")) == 1
    assert len(job.events("started")) == 3
    assert not (command.folder / "state" / "state.json").exists()


def test_a_rank_lost_while_the_launcher_is_away_is_replaced_by_the_next_one(start: Start, command: Command) -> None:
    with start() as first:
        pids = [first.pid(rank, 3) for rank in range(3)]
        first.wait_for(r"step 5 .*")
        kill(first)
    os.kill(pids[1], signal.SIGKILL)
    with start() as job:
        assert command.wait_until(lambda: len(job.events("generation")) == 3, 60), job.lines
        job.wait_for(r"enter 0 3 .*")
        stop(command, job)
    assert [event["world_size"] for event in job.events("generation")] == [3, 2, 3]
    numbers = [event["generation"] for event in job.events("generation")]
    assert numbers == sorted(set(numbers))
    assert {pids[0], pids[2]} <= job.survivors()
    assert len(job.survivors()) == 3
    assert [event["rank"] for event in job.events("lost")] == [1]


@pytest.mark.soak
def test_a_job_that_ended_while_the_launcher_was_away_ends_well_with_the_next_one(
    start: Start, command: Command
) -> None:
    with start() as first:
        pids = {first.pid(rank, 3) for rank in range(3)}
        first.wait_for(r"step 5 .*")
        kill(first)
    (command.folder / "stop").touch()
    assert command.wait_until(lambda: not workers(command), 60)
    with start() as job:
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert job.survivors() == pids
    assert job.events("lost") == []


def test_orphans_end_themselves_and_a_later_launcher_begins_anew(start: Start, command: Command) -> None:
    options, env = ("--orphan-timeout", "0.5"), {"UNIDIST_HEARTBEAT_SEC": "3"}
    with start(*options, **env) as first:
        first.wait_for(r"step 5 .*")
        kill(first)
        assert command.wait_until(lambda: not command.alive(), 30)
    with start(*options, **env) as job:
        job.wait_for(r"enter 0 \d 0 \d+")
        stop(command, job)
    assert job.events("host_lost")
    numbers = [event["generation"] for event in job.events("generation")]
    assert len(numbers) > 1
    assert numbers == sorted(set(numbers))


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_took_over_ends_the_job_at_a_signal(
    start: Start, command: Command, number: signal.Signals
) -> None:
    with start() as first:
        first.wait_for(r"step 5 .*")
        kill(first)
    with start() as job:
        job.wait_for(r"step .*")
        job.process.send_signal(number)
        job.end(seconds=30)
        assert command.wait_until(lambda: not command.alive(), 30)
    assert not (command.folder / "state" / "state.json").exists()


def test_a_damaged_state_is_refused_before_anything_is_started(start: Start, command: Command) -> None:
    (command.folder / "state").mkdir(mode=0o700)
    file = command.folder / "state" / "state.json"
    file.write_text("{")
    file.chmod(0o600)
    with start() as job:
        assert job.end() == 2
    assert any("is damaged" in line for line in job.lines)


@pytest.mark.soak
def test_launchers_and_ranks_that_are_killed_again_and_again_lose_no_step(start: Start, command: Command) -> None:
    first = start()
    with first:
        first.pid(0, 3)
        kill(first)
    for turn in range(10):
        with start() as job:
            job.wait_for(r"step .*")
            if turn % 3 == 0:
                os.kill(sorted(workers(command))[turn % 2], signal.SIGKILL)
                time.sleep(0.02 * turn)  # in all moments of the recovery
            kill(job)
    with start() as job:
        job.wait_for(r"step .*")
        stop(command, job)
    numbers = [event["generation"] for event in job.events("generation")]
    assert numbers == sorted(set(numbers))
