"""A process that is killed while it saves, at any moment, leaves a complete checkpoint: that one or the one before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import checkpoint_killing


@pytest.mark.parametrize(("mode", "kills"), [("replaced", 20), ("series", 15), ("asynchronous", 15)])
def test_a_complete_checkpoint_always_loads(tmp_path: Path, mode: str, kills: int) -> None:
    script = Path(checkpoint_killing.__file__)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "c"), mode, str(kills), "1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(outcomes) == kills
    for complete, found in outcomes:
        # One more than was reported may be there: the process was killed between the rename and its report.
        assert found in (complete, complete + 1), outcomes
    assert max(found for _, found in outcomes) > kills / 2
    left = {child.name for child in tmp_path.iterdir()}
    assert left <= {"c", ".c.writing", ".c.replaced"}
