"""What the shell is told when it asks how a command line goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def completed(words: str) -> list[str]:
    """Return what fish would offer after these words, of which the last is incomplete."""
    line = words.split(" ")
    environment = {
        **os.environ,
        "_UNIDIST_COMPLETE": "fish_complete",
        "COMP_WORDS": " ".join(["unidist", *line[:-1]]),
        "COMP_CWORD": line[-1],
    }
    command = [sys.executable, "-m", "unidist_launch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    return [line.partition(",")[2].partition("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ("lau", {"launch"}),
        ("launch --full", {"--full-tracebacks"}),
        ("launch --engine ", {"auto", "shm", "gloo"}),
        ("launch --engine glo", {"gloo"}),
        ("launch --strategy ", {"data", "zero", "tensor", "pipeline"}),
        ("launch --strategy zero=2,acc", {"zero=2,accumulate"}),
    ],
)
def test_commands_options_engines_and_strategies_are_completed(words: str, some: set[str]) -> None:
    found = set(completed(words))
    assert some <= found
    incomplete = words.split(" ")[-1]
    assert all(each.startswith(incomplete) for each in found)
