"""The example for Spark learns to read."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from unidist_command import Command

pytest.importorskip("pyspark", reason="needs PySpark: make test-integrations")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java", allow_module_level=True)

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

SCRIPT = str(Path(__file__).parents[3] / "examples/spark/digits.py")


def test_digits_are_read_by_ranks_in_tasks(command: Command) -> None:
    with command.start_words([sys.executable, SCRIPT], env=dict(os.environ)) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = re.search(r"test accuracy on 2 ranks: ([\d.]+)%", out)
    assert found is not None, out
    assert float(found[1]) > 85
