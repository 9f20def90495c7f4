"""`unidist doctor --measure`: a real measurement, and a plan made from it."""

from __future__ import annotations

import json
from subprocess import CompletedProcess

import pytest
from unidist_command import Command


@pytest.mark.parallel
def test_what_was_measured_is_printed_written_and_planned_with(command: Command) -> None:
    done = command.run("doctor", "--measure", "here.json", "--measure-ranks", "2", "--measure-engine", "shm")
    assert done.returncode == 0, done.stderr
    for text in ("GFLOP/s", "GB/s", "all-reduce", "shm", "here.json"):
        assert text in done.stdout
    written = json.loads((command.folder / "here.json").read_text())
    assert written["num_ranks"] == 2
    assert written["flops"] > 1e8
    assert written["message"]["fixed"] >= 0
    sizes = ["--layers", "2", "--hidden", "64", "--vocab", "100", "--sequence", "32", "--batch", "4", "-np", "2"]
    planned = command.run("plan", "--measured", "here.json", *sizes, "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["best"][0]["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--measure", "x.json", "--measure-ranks", "1"), "--measure-ranks 1: one rank exchanges nothing"),
        (("--measure", "nowhere/x.json"), "cannot be written"),
        (("--measure-ranks", "2"), "give --measure FILE too"),
    ],
)
def test_what_cannot_be_measured_is_an_error_and_leaves_no_file(
    arguments: tuple[str, ...], message: str, command: Command
) -> None:
    check_refused(command, command.run_here("doctor", *arguments), message)


def test_an_engine_that_there_is_not_is_an_error_of_the_ranks_and_leaves_no_file(command: Command) -> None:
    done = command.run("doctor", "--measure", "x.json", "--measure-engine", "pigeon")
    check_refused(command, done, "pigeon")


def check_refused(command: Command, done: CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2
    assert message in done.stderr
    assert list(command.folder.iterdir()) == []
