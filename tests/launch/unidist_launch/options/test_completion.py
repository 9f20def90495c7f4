"""What the shell is told when it asks how a command line goes on."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
from unidist_command import Command


def completed(run: Callable[..., CompletedProcess[str]], words: str) -> set[str]:
    """Return what fish would offer after these words, of which the last is incomplete."""
    line = words.split(" ")
    variables = {
        "_UNIDIST_COMPLETE": "fish_complete",
        "COMP_WORDS": " ".join(["unidist", *line[:-1]]),
        "COMP_CWORD": line[-1],
    }
    done = run(env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    return {line.partition(",")[2].partition("\t")[0] for line in done.stdout.splitlines()}


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
def test_commands_options_engines_and_strategies_are_completed(command: Command, words: str, some: set[str]) -> None:
    found = completed(command.run_here, words)
    assert some <= found
    incomplete = words.split(" ")[-1]
    assert all(each.startswith(incomplete) for each in found)


def test_a_process_answers_the_shell_too(command: Command) -> None:
    words = "launch --engine glo"
    assert completed(command.run, words) == completed(command.run_here, words) >= {"gloo"}
