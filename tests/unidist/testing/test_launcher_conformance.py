"""The suite of launchers finds the faults that launchers have: each is run against one with a fault."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unidist.engine import Availability
from unidist.launcher import Job, Launcher
from unidist.testing import LauncherConformance

pytestmark = pytest.mark.parallel


class Careless(Launcher):
    """Starts ranks by hand: they cannot meet, their lines carry no rank, and nobody looks after them."""

    def availability(self) -> Availability:
        return Availability(True)

    def run(self, job: Job) -> int:
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        ranks = [
            subprocess.Popen(
                job.command,
                env={**os.environ, **job.env, **local, "RANK": str(rank), "WORLD_SIZE": str(job.num_proc)},
                start_new_session=True,
            )
            for rank in range(job.num_proc)
        ]
        for rank in ranks:
            rank.wait()
        return 0


class Suite(LauncherConformance):
    path = "test_launcher_conformance:Careless"
    limit_sec = 4.0


FAULTS: list[tuple[str, Callable[[Suite], Any]]] = [
    ("local rank", Suite.test_every_rank_knows_its_place_and_has_the_jobs_variables),
    ("not in the output", Suite.test_each_line_of_output_says_whose_it_is),
    (
        "timed out",
        lambda suite: suite.test_the_rank_that_fails_first_decides_the_exit_code_and_the_others_end("sys.exit(7)", 7),
    ),
    ("timed out", Suite.test_a_signal_reaches_every_rank),
    ("timed out", Suite.test_what_ranks_leave_in_the_background_ends_with_the_job),
    ("left behind", Suite.test_nothing_is_left_when_the_launcher_is_killed),
]


@pytest.mark.parametrize(
    ("message", "case"), FAULTS, ids=[f"{number}: {message}" for number, (message, _) in enumerate(FAULTS)]
)
def test_a_fault_is_found(
    message: str, case: Callable[[Suite], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    suite = Suite()
    suite.set_up(tmp_path)
    with pytest.raises((AssertionError, subprocess.TimeoutExpired), match=message):
        case(suite)
    suite.limit_sec = 0.1  # type: ignore[misc]  # what is left is known
    with contextlib.suppress(AssertionError):
        suite.tear_down()
