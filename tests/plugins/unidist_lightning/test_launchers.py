"""`Trainer(strategy="unidist")` in a script that imports nothing of unidist, whoever starts its processes."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest
from unidist_command import Command

pytest.importorskip("lightning")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

SCRIPT = str(Path(__file__).parent / "_lightning_script.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run(command: Command, words: list[str]) -> tuple[int, int, float]:
    """Run a command; return the number of ranks, of steps, and the sum of all parameters."""
    with command.start_words(words, env={**os.environ, **ONE_THREAD}) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (found,) = re.findall(r"(\d) rank\(s\), step (\d+): (0x[0-9a-f.]+p[+-]\d+)", out)
    return int(found[0]), int(found[1]), float.fromhex(found[2])


def test_ranks_are_those_of_the_launcher(command: Command) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    alone = run(command, [sys.executable, SCRIPT, "12"])
    assert alone[:2] == (1, 15)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    launch = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "--strategy", "zero=2"]
    for words in (launch, torchrun):
        found = run(command, [*words, SCRIPT, "6"])
        assert found[:2] == (2, 15)
        assert found[2] == pytest.approx(alone[2], abs=1e-11)


def test_a_killed_rank_is_named_and_nothing_is_left_running(command: Command) -> None:
    done = command.run("launch", "-np", "2", SCRIPT, "6", "7", env=ONE_THREAD)
    assert done.returncode != 0
    assert re.search(r"unidist: rank 1 failed first .*(SIGKILL|signal 9)", done.stderr), done.stderr
    assert command.wait_until(lambda: not command.alive(), 30)


@pytest.mark.parametrize("line", ["data", "zero=2"])
def test_an_elastic_job_goes_on_with_the_samples_that_are_left(line: str, command: Command) -> None:
    """A rank dies in the second epoch, and another takes its place: the parameters are as if nothing had happened."""
    expected = run(command, [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", SCRIPT, "6"])
    words = ["launch", "-np", "2", "--min-np", "2", "--strategy", line, SCRIPT, "6", "7"]
    done = command.run(*words, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert (command.folder / "died").exists()
    (found,) = re.findall(r"(\d) rank\(s\), step (\d+): (0x[0-9a-f.]+p[+-]\d+)", done.stdout)
    assert (int(found[0]), int(found[1])) == (2, 15)
    assert float.fromhex(found[2]) == pytest.approx(expected[2], abs=1e-11)
