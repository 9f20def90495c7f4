"""Whether a process still runs, as its launcher can tell."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from unidist.jobs import StopWatch
from unidist.jobs.sweep import is_stopped


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as started:
        yield started
        started.kill()


def stop(process: subprocess.Popen[bytes], *, until: bool = True) -> None:
    process.send_signal(signal.SIGSTOP if until else signal.SIGCONT)
    while is_stopped(process.pid) != until:
        pass


def test_time_counts_while_a_process_is_stopped(process: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(process.pid)
    assert watch.seconds(100.0) == 0.0
    stop(process)
    assert [watch.seconds(at) for at in (100.9, 101.8, 102.7)] == pytest.approx([0.0, 0.9, 1.8])
    stop(process, until=False)
    assert watch.seconds(103.6) == 0.0


def test_time_in_which_the_observer_stood_still_does_not_count(process: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(process.pid)
    stop(process)
    assert [watch.seconds(at) for at in (100.0, 100.9, 160.9, 161.5)] == pytest.approx([0.0, 0.9, 0.9, 1.5])


def test_a_process_that_has_ended_is_not_stopped(process: subprocess.Popen[bytes]) -> None:
    watch = StopWatch(process.pid)
    stop(process)
    assert watch.seconds(100.0) == 0.0
    process.kill()
    process.wait()
    assert watch.seconds(100.9) == 0.0
