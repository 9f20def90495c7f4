"""What is started on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.options.command_line import resolve


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_runs_with_this_interpreter_unbuffered(folder: Path) -> None:
    (folder / "train.py").touch()
    assert resolve(["train.py", "-x", "1"], module=False, environ={}) == (sys.executable, "-u", "train.py", "-x", "1")


def test_a_module_runs_as_python_does(folder: Path) -> None:
    (folder / "pack").mkdir()
    assert resolve(["pack.train", "a"], module=True, environ={}) == (sys.executable, "-u", "-m", "pack.train", "a")
    assert resolve(["json.tool"], module=True, environ={})[-1] == "json.tool"


def test_a_module_is_found_on_the_ranks_python_path(folder: Path) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "only_there.py").touch()
    assert resolve(["only_there"], module=True, environ={"PYTHONPATH": str(folder / "lib")})[-1] == "only_there"
    with pytest.raises(ConfigurationError, match="'only_there' is neither here nor installed"):
        resolve(["only_there"], module=True, environ={})


def test_horovods_modules_are_there_for_ranks_that_get_unidist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(folder)])  # without a Horovod that is installed
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    command = ["horovod.tensorflow.data.compute_worker"]
    assert resolve(command, module=True, environ={"UNIDIST_AS_HOROVOD": "1"})[3:] == tuple(command)
    with pytest.raises(ConfigurationError, match="'horovod' is neither here nor installed"):
        resolve(command, module=True, environ={"UNIDIST_AS_HOROVOD": "0"})


def test_any_other_program_is_looked_up_on_the_ranks_path(folder: Path) -> None:
    program = folder / "bin" / "prog"
    program.parent.mkdir()
    program.touch(0o755)
    assert resolve(["prog", "a"], module=False, environ={"PATH": str(program.parent)}) == (str(program), "a")
    assert resolve(["./bin/prog"], module=False, environ=dict(os.environ)) == ("./bin/prog",)


@pytest.mark.parametrize(
    ("command", "module", "message"),
    [
        ([], False, "nothing to run"),
        ([], True, "name of a module after -m"),
        (["trian.py"], False, r"script 'trian.py' does not exist .* Did you mean 'train.py'"),
        (["no/where/x.py"], False, "script 'no/where/x.py' does not exist"),
        (["folder.py"], False, "is not a file"),
        (["no-such-program"], False, "'no-such-program' does not exist on the PATH"),
        (["data"], False, r"to run the file here, write './data'"),
        (["./data"], False, "is not executable: `chmod"),
        (["./folder.py/"], False, "is a folder"),
        (["train.py"], True, "not the name of a module"),
        (["a/b"], True, "not the name of a module"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(
    folder: Path, command: list[str], module: bool, message: str
) -> None:
    (folder / "train.py").touch()
    (folder / "data").touch(0o644)
    (folder / "folder.py").mkdir()
    with pytest.raises(ConfigurationError, match=message):
        resolve(command, module=module, environ=dict(os.environ))
