"""What `python -m tools.affected` prints, in a small repository."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.affected.__main__ import main


@pytest.fixture
def root(write: Callable[[dict[str, str]], Path]) -> Path:
    """A repository with one commit."""
    root = write(
        {
            "unidist/a.py": "",
            "unidist/b.py": "import unidist.a",
            "tests/test_a.py": "import unidist.a",
            "tests/test_b.py": "import unidist.b",
            "tests/test_c.py": "",
            ".gitignore": "ignored.py",
        }
    )
    git(root, "init", "--quiet")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, timeout=60)


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Change")


def printed(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments, root) == 0
    return capsys.readouterr().out.splitlines()


def test_nothing_has_changed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(root, capsys) == []


def test_changed_new_and_deleted_files_count(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "unidist/b.py").write_text("x = 1")
    assert printed(root, capsys) == ["tests/test_b.py"]
    (root / "tests/test_new.py").touch()
    (root / "ignored.py").touch()
    assert printed(root, capsys) == ["tests/test_b.py", "tests/test_new.py"]
    (root / "unidist/a.py").unlink()
    (root / "tests/test_b.py").unlink()
    assert printed(root, capsys) == ["tests/test_a.py", "tests/test_new.py"]
    commit(root)
    assert printed(root, capsys) == []
    assert printed(root, capsys, "--since", "HEAD~1") == ["tests/test_a.py", "tests/test_new.py"]


def test_a_test_is_explained(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "unidist/a.py").write_text("x = 1")
    assert printed(root, capsys, "--explain", "tests/test_b.py") == [
        "unidist/a.py has changed",
        "unidist/b.py imports unidist.a",
        "tests/test_b.py imports unidist.b",
    ]
    assert printed(root, capsys, "--explain", "tests/test_c.py") == ["no change affects tests/test_c.py"]


def test_what_cannot_be_read_is_an_error_of_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--since", "no-such-commit"], root) == 2
    assert capsys.readouterr().err == (
        "git cannot compare with 'no-such-commit': fatal: bad revision 'no-such-commit'\n"
    )
    (root / "tests/test_c.py").write_text("def test(:\n")
    assert main([], root) == 2
    assert capsys.readouterr().err == "tests/test_c.py:1: invalid syntax\n"
