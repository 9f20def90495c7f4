"""A script with `UnidistTrainer` under each launcher."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest
from unidist_command import Command

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

SCRIPT = str(Path(__file__).parent / "_transformers_script.py")
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
    alone = run(command, [sys.executable, SCRIPT, "4"])
    assert alone[:2] == (1, 12)
    launch = ["-m", "unidist_launch", "launch", "-np", "2", "--strategy", "zero=2"]
    accelerate = [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]  # by torchrun
    accelerate += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    accelerate += ["--main_process_port", port]
    for words in (launch, accelerate):
        found = run(command, [sys.executable, *words, SCRIPT, "2"])
        assert found[:2] == (2, 12)
        assert found[2] == pytest.approx(alone[2], abs=1e-11)


def test_a_killed_rank_is_named_and_nothing_is_left_running(command: Command) -> None:
    done = command.run("launch", "-np", "2", SCRIPT, "2", "7", env=ONE_THREAD)
    assert done.returncode != 0
    assert re.search(r"unidist: rank 1 failed first .*(SIGKILL|signal 9)", done.stderr), done.stderr
    assert command.wait_until(lambda: not command.alive(), 30)
