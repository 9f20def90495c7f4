"""The tag of a wheel says what is in it: of this kind of processor with extensions, of any machine without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("compiler", "tag"),
    [("false", "py3-none-any"), ("cc", r"cp311-abi3-linux_\w+")],
)
def test_a_wheel_of_any_machine_is_one_without_extensions(tmp_path: Path, compiler: str, tag: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler")
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "setup.cfg").write_text(
        "[metadata]\nname = small\nversion = 1\n[bdist_wheel]\npy_limited_api = cp311\n"
    )
    # One empty source for each extension, in place of ours.
    folders = re.findall(r'"([\w/]+/native|[\w/]+_native)"', text)
    assert len(folders) >= 5
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "empty.c").write_text("int unidist_empty(void) { return 0; }\n")
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "bdist_wheel"],
        cwd=tmp_path,
        env={**os.environ, "CC": compiler, "LDSHARED": f"{compiler} -shared"},
        check=True,
        capture_output=True,
        timeout=120,
    )
    [wheel] = (tmp_path / "dist").iterdir()
    assert re.fullmatch(rf"small-1-{tag}\.whl", wheel.name)
