"""The loss curves of strategies lie on that of one process, and the picture is drawn."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--steps", "24", "--layers", "1", "--width", "32", "--context", "32", "--modules", "20")


@pytest.mark.parametrize(("framework", "needs"), [("torch", "torch"), ("keras", "tensorflow")])
def test_curves_of_strategies_are_those_of_one_process(tmp_path: Path, framework: str, needs: str) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    picture = tmp_path / "curves.png"
    command = [sys.executable, str(ROOT / "examples" / "compare_strategies.py"), "--framework", framework]
    command += ["--out", str(picture), "--tolerance", "0.001", *SMALL]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"^(\S.*?) +last loss ([\d.]+), largest difference (\S+) ", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in found] == ["one process", "pipeline=2", "tensor=2", "pipeline=2,tensor=2"]
    assert any(float(difference) > 0 for _, _, difference in found)  # they were computed in different ways
    assert picture.read_bytes().startswith(b"\x89PNG")
