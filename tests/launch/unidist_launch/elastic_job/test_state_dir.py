"""The folder of a job's state: for one launcher at a time, whole or refused, and nobody else's business."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.elastic_job.state_dir import StateDir

STATE = {"secret": "abc", "members": [1, 2]}


def test_what_was_written_last_is_read_until_it_is_removed(tmp_path: Path) -> None:
    folder = StateDir(tmp_path / "new" / "job")
    assert folder.read() is None
    folder.write({"members": []})
    folder.write(STATE)
    folder.close()
    folder.close()
    again = StateDir(tmp_path / "new" / "job")
    assert again.read() == STATE
    again.remove()
    again.remove()
    assert again.read() is None
    again.close()


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = StateDir(tmp_path / "job")
        folder.write(STATE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "job" / "state.json").stat().st_mode) == 0o600
    (tmp_path / "job" / "state.json").chmod(0o644)
    with pytest.raises(ConfigurationError, match="others may read"):
        folder.read()
    folder.close()


def test_a_second_launcher_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from unidist_launch.elastic_job.state_dir import StateDir; "
    code += "held = StateDir(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=rf"whose launcher runs \(process {first.pid}\)"):
            StateDir(tmp_path)
        first.kill()
        first.wait()
    StateDir(tmp_path).close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-5],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"abc"', '"abd"'),
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: "\x00" * len(text),
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, damage: object) -> None:
    folder = StateDir(tmp_path)
    folder.write(STATE)
    file = tmp_path / "state.json"
    file.write_text(damage(file.read_text()))  # type: ignore[operator]  # one of the functions above
    with pytest.raises(ConfigurationError, match="is damaged"):
        folder.read()
    folder.close()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    folder = StateDir(tmp_path)
    folder.write(STATE)
    (tmp_path / "state.json.new").mkdir()
    with pytest.raises(OSError, match=r"state\.json\.new"):
        folder.write({"members": []})
    assert folder.read() == STATE
    folder.close()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be used"):
        StateDir(tmp_path / "file" / "job")
