"""A strategy of somebody else that has processes beside the ranks, from the command line."""

from __future__ import annotations

import pytest
from unidist_command import Command

import unidist
from unidist.errors import ConfigurationError

pytestmark = pytest.mark.parallel

_SCRIPT = """
    import unidist.horovod_api as ud
    from unidist_sample.board import say_hello
    ud.init()
    print(ud.role(), say_hello(ud.rank(), boards=2), flush=True)
    ud.shutdown()
"""


def test_its_processes_are_started_and_answer_the_ranks(command: Command) -> None:
    done = command.run("launch", "-np", "2", "--strategy", "sample-board=2", command.script(_SCRIPT))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] chief hello 0 1", "[1] worker hello 0 1"]
    for index in range(2):
        assert f"[board {index}] answered" in done.stderr
    assert "has ended before the ranks" not in done.stderr


def test_its_processes_outlive_generations_of_an_elastic_job(command: Command) -> None:
    script = command.script(_SCRIPT)
    done = command.run("launch", "-np", "2", "--min-np", "1", "--strategy", "sample-board=2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == ["chief hello 0 1", "worker hello 0 1"]


def test_what_starts_ranks_alone_refuses_it() -> None:
    with pytest.raises(ConfigurationError, match=r"needs processes beside the ranks \(board 0, ...\), which"):
        unidist.run(len, ("",), num_proc=2, strategy="sample-board")
