"""The small file by which `unidist top` finds a job, and files of tokens."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist_status import file as status_file
from unidist_status.file import StatusAddress


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def address(pid: int = 0) -> StatusAddress:
    return StatusAddress("http://127.0.0.1:1/", "t" * 20, pid or os.getpid(), ("train.py", "--x"))


def test_a_file_is_its_users_alone_and_is_read_as_it_was_written(runtime: Path) -> None:
    path = status_file.default_path()
    os.umask(umask := os.umask(0))  # what the user's umask is must not matter
    try:
        os.umask(0)
        status_file.write(path, address())
    finally:
        os.umask(umask)
    assert path.parent == runtime / "unidist"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert status_file.read(path) == address()
    assert address().full_url == f"http://127.0.0.1:1/?token={'t' * 20}"
    status_file.remove(path)
    assert list(path.parent.iterdir()) == []


def test_the_file_of_another_job_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "job"
    status_file.write(path, address(pid=1))
    status_file.remove(path)
    assert path.exists()


def test_jobs_that_run_are_found_and_files_of_dead_launchers_go(runtime: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    folder = status_file.runtime_folder()
    status_file.write(status_file.default_path(), address())
    status_file.write(folder / "job-1.json", address(pid=dead.pid))
    (folder / "job-2.json").write_text("half a fi")
    assert status_file.running_jobs() == [address()]
    assert not (folder / "job-1.json").exists()


def test_a_folder_that_others_may_write_to_is_refused(runtime: Path) -> None:
    (runtime / "unidist").mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="--status-file"):
        status_file.default_path()
    (runtime / "unidist").rmdir()
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "unidist").symlink_to(runtime / "elsewhere")
    with pytest.raises(ConfigurationError, match="of yours alone"):
        status_file.default_path()


def test_a_link_in_the_way_of_the_draft_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".job.{os.getpid()}").symlink_to(victim)
    status_file.write(tmp_path / "job", address())
    assert victim.read_text() == "precious"
    assert status_file.read(tmp_path / "job") == address()


def test_what_is_no_such_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--status-port runs"):
        status_file.read(tmp_path / "none")
    (tmp_path / "other").write_text('{"url": 1}')
    with pytest.raises(ConfigurationError, match="is no file of"):
        status_file.read(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        status_file.write(tmp_path / "no" / "job", address())


def test_a_token_comes_from_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef0123\n")
    path.chmod(0o600)
    assert status_file.read_token(path) == "0123456789abcdef0123"
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        status_file.read_token(path)


@pytest.mark.parametrize("text", ["", "short", "0123456789 abcdef0123", "0123456789abcdef\n0123456789abcdef", "ü" * 20])
def test_what_is_no_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="at least 16"):
        status_file.read_token(path)
