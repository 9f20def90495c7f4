"""The command line of horovodrun as that of `unidist launch`."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.commands.horovodrun import _num_values
from unidist_launch.horovod.arguments import translated


def arguments(line: str) -> str:
    found = translated(line.split(), _num_values())
    assert found.warnings == []
    return " ".join(found.arguments)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-np 2 python train.py -v -p 3", "-np 2 python train.py -v -p 3"),
        ("-v", "--version"),
        ("-p 22 -np 2 x", "--ssh-port 22 -np 2 x"),
        ("-np 2 --stall-check --verbose x", "-np 2 --verbose x"),
        ("--num-p 2 --cycle-time=3 x", "--num-proc 2 --cycle-time-ms=3 x"),
        ("--gloo --hosts -p x", "--gloo --hosts -p x"),  # a value may look like a flag
        ("--mpi-args=--map-by=x -np 2 x --num", "--mpi-args=--map-by=x -np 2 x --num"),
        ("--engine shm -np 2 x", "--engine shm -np 2 x"),
        ("-np 2 -- -v", "-np 2 -- -v"),
        ("--no-such-flag x", "--no-such-flag x"),
        (
            "--min-np 1 --blacklist-cooldown-range 1 2 --reset-limit 3 -np 1 -v",
            "--min-np 1 --blacklist-cooldown-range 1 2 --reset-limit 3 -np 1 --version",
        ),
    ],
)
def test_flags_that_mean_something_else_are_translated_up_to_the_command(line: str, expected: str) -> None:
    assert arguments(line) == expected


def test_flags_of_elastic_jobs_are_left_out_of_others_with_a_warning() -> None:
    line = "-np 2 --blacklist-cooldown-range 1 2 --reset-limit=3 python train.py"
    found = translated(line.split(), _num_values())
    assert found.arguments == ["-np", "2", "python", "train.py"]
    assert [warning.partition(" ")[0] for warning in found.warnings] == ["--blacklist-cooldown-range", "--reset-limit"]


def test_an_abbreviation_of_several_flags_is_an_error_that_names_them() -> None:
    with pytest.raises(ConfigurationError, match="--log-hide-timestamp, --log-level"):
        arguments("--log DEBUG -np 2 x")
