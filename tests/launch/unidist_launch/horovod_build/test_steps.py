"""Commands of a build: their log, their errors, their end."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.horovod_build.steps import Steps, last_error_lines


def run(folder: Path, script: str, *, seconds: float = 30) -> str:
    steps = Steps(folder / "log", timeout=timedelta(seconds=seconds), say=lambda text: None)
    return steps.run("compiling", ["sh", "-c", script], env=os.environ, cwd=folder, failure="It failed.")


def test_what_a_command_prints_is_returned_and_logged(tmp_path: Path) -> None:
    assert "one\ntwo" in run(tmp_path, "echo one; echo two >&2")
    assert "one\ntwo" in (tmp_path / "log").read_text()


def test_a_failure_tells_the_log_and_the_lines_with_errors(tmp_path: Path) -> None:
    script = "echo a.cc:1: error: bad; echo 0 errors; echo compiling error.cc; echo done; exit 3"
    with pytest.raises(ConfigurationError) as caught:
        run(tmp_path, script)
    text = str(caught.value)
    assert text.startswith("It failed. The log is ")
    assert str(tmp_path / "log") in text
    assert text.endswith("a.cc:1: error: bad")


def test_without_a_line_about_an_error_the_last_ones_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="last words"):
        run(tmp_path, "echo last words; exit 1")


def test_bytes_that_are_no_text_do_not_hide_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="error: \N{REPLACEMENT CHARACTER}bad"):
        run(tmp_path, r"printf 'error: \377bad\n'; exit 1")


def test_a_log_that_is_gone_has_no_lines(tmp_path: Path) -> None:
    assert last_error_lines(tmp_path / "none") == []


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "log", timeout=timedelta(seconds=5), say=lambda text: None)
    with pytest.raises(ConfigurationError, match="no-such-program"):
        steps.run("trying", ["no-such-program"], env=os.environ, cwd=tmp_path, failure="It failed.")


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--timeout"):
        run(tmp_path, "echo begun; sleep 1000", seconds=0.3)
