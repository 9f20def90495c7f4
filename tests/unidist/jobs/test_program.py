"""What programs of ours begin and end with: standard streams that are open, and an exit code that is kept."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHIPPED = ("unidist", "launch", "plugins", "adapters")
WITHOUT = {
    "unidist/horovod_imports/__main__.py": "prints a line, and opens nothing",
    "unidist/jobs/sweep.py": "is started with all three streams, and without the rest of the package",
}

OPENS = """
import os, sys
from unidist.jobs import run_program

def main():
    number = os.open("/", os.O_RDONLY)
    os.write(2, b"lost\\n")
    sys.stderr.write("lost, too\\n")
    sys.stdout.write("")
    sys.stdin.read()
    return 3 if number > 2 else 4

run_program(main)
"""

ENDS = """
import atexit, sys, threading
from unidist.jobs import run_program

def main():
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: print("thread")).start()
    {end}

run_program(main)
"""


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_no_descriptor_of_a_program_is_a_standard_stream(closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", OPENS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("return None", 0, ""),
        ("return 7", 7, ""),
        ("sys.exit(5)", 5, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
@pytest.mark.parametrize("inspect", ["", "1"])
def test_an_exit_is_the_same_with_pythoninspect(end: str, code: int, error: str, inspect: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(end=end)],
        env={**os.environ, "PYTHONINSPECT": inspect},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "thread\nat exit\n")
    assert done.stderr.endswith(error)
    assert bool(done.stderr) == bool(error)


def test_all_programs_run_in_this_way() -> None:
    others = [
        str(file.relative_to(ROOT))
        for folder in SHIPPED
        for file in (ROOT / folder).rglob("*.py")
        if _is_program(file) and "run_program(" not in file.read_text()
    ]
    # The command's function is that of the console script, too.
    assert set(others) == {*WITHOUT, "launch/unidist_launch/__main__.py"}
    assert "run_program(" in (ROOT / "launch/unidist_launch/cli.py").read_text()


def _is_program(file: Path) -> bool:
    return file.name == "__main__.py" or any(
        isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in ast.parse(file.read_text()).body
    )
