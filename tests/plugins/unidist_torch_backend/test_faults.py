"""A dead rank, or one that does not come, is an error that names it, wherever the script waits; never a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.parallel

SCRIPT = Path(__file__).parent / "_faults_script.py"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 raised in each fault."""
    words = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("stores"))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=400, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "fault",
    ["all_reduce", "asynchronous", "future", "callback", "receive", "receive from any", "send", "new_group", "FSDP2"],
)
def test_a_rank_that_dies_is_named(answers: dict[str, Any], fault: str) -> None:
    kind, text, _ = answers[fault]
    assert kind == "PeerLostError"
    assert "rank 1 " in text
    assert "died" in text


@pytest.mark.parametrize("fault", ["DDP", "DDP with a hook"])
def test_a_rank_that_dies_in_a_backward_pass_is_named(answers: dict[str, Any], fault: str) -> None:
    """PyTorch's C++ reads the future: its error has the text of ours."""
    kind, text, _ = answers[fault]
    assert kind in ("RuntimeError", "PeerLostError")
    assert "PeerLostError: allreduce on rank 0" in text or kind == "PeerLostError"
    assert "rank 1 (world rank 1) died" in text


@pytest.mark.parametrize("fault", ["late", "late future", "late message"])
def test_a_rank_that_does_not_come_within_the_timeout_is_named(answers: dict[str, Any], fault: str) -> None:
    kind, text, seconds = answers[fault]
    assert kind == "StalledError"
    assert "rank(s) 1 did not come within 5 s" in text
    assert seconds >= 5


def test_a_monitored_barrier_names_who_is_missing(answers: dict[str, Any]) -> None:
    kind, text, _ = answers["late monitored"]
    assert (kind, "rank(s) 1 did not come within 1 s" in text) == ("StalledError", True)


def test_an_abort_ends_the_waits_of_the_others(answers: dict[str, Any]) -> None:
    kind, text, _ = answers["aborted"]
    assert kind == "PeerLostError"
    assert "rank 1 called abort: the process group was aborted" in text
