"""Elastic jobs with a folder for checkpoints: what is left when all of a job is gone, and what the next makes of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_job import ElasticJob, script, total
from unidist_command import Command

from unidist.checkpoint.format import directory

pytestmark = pytest.mark.parallel

Start = Callable[..., ElasticJob]


@pytest.fixture
def start(command: Command) -> Start:
    def launch(size: int, *options: str) -> ElasticJob:
        events = command.folder / "events.jsonl"
        name = command.script(script())
        arguments = ["launch", "-np", str(size), "--min-np", "1", "--checkpoint-dir", "run", "--event-log", str(events)]
        return ElasticJob(command.start(*arguments, *options, sys.executable, name, "1000000", "0.02"), events)

    return launch


def newest(folder: Path) -> int:
    return directory.steps(folder / "run")[-1][0]


def test_a_job_of_which_nothing_is_left_is_continued_by_one_of_another_size(start: Start, command: Command) -> None:
    with start(2, "--checkpoint-interval", "0.1") as job:
        job.wait_for(r"step 5 .*")
        assert command.wait_until(lambda: bool(job.events("checkpoint")), 240), job.lines
        job.process.kill()
        job.process.wait()
        assert command.wait_until(lambda: not command.alive(), 60)
    commit = newest(command.folder)
    with start(3) as job:
        for rank in range(3):
            assert job.wait_for(rf"enter {rank} 3 (\d+) \d+") == (str(commit),)
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
        (steps,) = job.steps()
        assert steps > commit
        assert job.totals() == {total(steps)}
        (loaded,) = job.events("checkpoint_loaded")
        assert (loaded["commit"], loaded["path"]) == (commit, str(command.folder / "run" / f"step-{commit:08d}"))
        assert newest(command.folder) == steps  # what training came to
    assert len(directory.steps(command.folder / "run")) == 2


def test_a_folder_that_cannot_be_written_is_an_error_before_ranks_start(start: Start, command: Command) -> None:
    (command.folder / "file").touch()
    with start(2, "--checkpoint-dir", "file/run") as job:
        assert job.end() == 2, job.lines
    (line,) = job.lines
    assert "checkpoint-dir" in line
    assert "Not a directory" in line


def test_a_job_that_is_told_to_end_loses_no_step(start: Start, command: Command) -> None:
    with start(2, "--checkpoint-interval", "3600", "--grace-period", "60") as job:
        job.wait_for(r"step 3 .*")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM, job.lines
        reached = max(int(step) for (step,) in job.said(r"step (\d+) .*"))
        # The commit at which it left raises, so that its line is not printed.
        assert newest(command.folder) in (reached, reached + 1)
        (made,) = job.events("checkpoint")
        assert made["commit"] == newest(command.folder)
        assert made["held_up_sec"] > 0.0
