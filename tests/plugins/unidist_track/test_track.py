"""`unidist launch --track`: records of real jobs, and what goes wrong with them."""

from __future__ import annotations

import csv
import os
import signal
import time

import psutil
import pytest
from tracked_jobs import LAST_LOSSES, NAMES, NUM_STEPS, SCRIPT
from unidist_command import Command

pytestmark = pytest.mark.parallel


def rows_of(command: Command, name: str) -> list[dict[str, str]]:
    with (command.folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_job_is_recorded_up_to_its_last_step(command: Command) -> None:
    ended = command.run("launch", "-np", "2", "--track", "csv:runs/1.csv", command.script(SCRIPT))
    assert ended.returncode == 0, ended.stderr
    rows = rows_of(command, "runs/1.csv")
    assert {row["name"] for row in rows} == NAMES
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1
    last = {row["name"]: float(row["value"]) for row in rows if int(row["step"]) == NUM_STEPS}
    assert LAST_LOSSES[0] <= last["loss"] <= LAST_LOSSES[1]
    assert last["world_size"] == 2
    assert last["samples_per_sec"] > 0
    assert last["memory_bytes"] > 1e6
    assert 0 <= last["waiting"] <= 1
    assert abs(float(rows[-1]["time"]) - time.time()) < 600


def test_a_second_job_adds_to_the_file_and_two_trackers_get_the_same(command: Command) -> None:
    script = command.script(SCRIPT)
    for _ in range(2):
        ended = command.run("launch", "-np", "1", "--track", "csv:a.csv", "--track", "csv:b.csv", script)
        assert ended.returncode == 0, ended.stderr
    assert (command.folder / "a.csv").read_text() == (command.folder / "b.csv").read_text()
    assert sum(row["name"] == "loss" and int(row["step"]) == NUM_STEPS for row in rows_of(command, "a.csv")) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("csv", "--track csv: write KIND:TARGET"),
        (":runs", "--track :runs: write KIND:TARGET"),
        ("nothing:runs", "unknown tracker 'nothing'. Choices: csv"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_job(command: Command, given: str, said: str) -> None:
    ended = command.run_here("launch", "-np", "1", "--track", given, command.script("print('ran')"))
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "ran" not in ended.stdout


def test_a_tracker_that_fails_does_not_stop_the_job(command: Command) -> None:
    (command.folder / "file").touch()
    ended = command.run("launch", "-np", "1", "--track", "csv:file/1.csv", command.script(SCRIPT))
    assert ended.returncode == 0
    assert ended.stderr.count("--track csv: recording has ended: ") == 1
    assert "file" in ended.stderr


def test_a_killed_launcher_leaves_no_tracker_behind(command: Command) -> None:
    launcher = command.start("launch", "-np", "1", "--track", "csv:1.csv", command.script(SCRIPT + "time.sleep(60)"))
    try:
        deadline = time.monotonic() + 60
        while not (command.folder / "1.csv").exists():
            assert time.monotonic() < deadline, "the record was not begun"
            time.sleep(0.05)
        (writer,) = (
            each
            for each in psutil.Process(launcher.pid).children()
            if "unidist_track.writer" in " ".join(each.cmdline())
        )
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.communicate()
    psutil.wait_procs([writer], timeout=30)
    assert not writer.is_running()
