"""The most frequent operations pass no more files and calls than is allowed."""

from __future__ import annotations

import re

import pytest

from tools.walks.__main__ import main
from tools.walks.counting import LIMITS
from tools.walks.step_counts import BUCKETS, GRADIENTS


def test_walks_are_within_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["--list"]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert all(f"\n{name}" in printed for name in LIMITS)
    # They were counted: no step does without these.
    assert re.search(rf"^messages +{BUCKETS + 2}$", printed, re.MULTILINE)
    assert re.search(rf"^copies +{GRADIENTS}$", printed, re.MULTILINE)
