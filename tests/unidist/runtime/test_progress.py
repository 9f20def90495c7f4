"""What a rank tells its launcher of its progress."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from unidist.errors import UsageError
from unidist.runtime.progress import ProgressReporter
from unidist.settings.rank_process import PROCESS_VARIABLE, RankProcess, ReportMemory, announce_rank_process
from unidist.timeline import Recorder


@pytest.fixture
def launcher() -> Iterator[RankProcess]:
    made = RankProcess()
    yield made
    made.close()


def progress_of(launcher: RankProcess, *, counts: bool = True) -> ProgressReporter:
    memory = ReportMemory.inherited({PROCESS_VARIABLE: str(launcher.fd)})
    assert memory is not None
    return ProgressReporter(3, memory, Recorder(), counts_samples=lambda: counts)


def last(launcher: RankProcess) -> dict[str, Any]:
    found = launcher.new_report()
    assert found is not None
    return found


def test_the_launcher_reads_steps_samples_memory_and_values_once(launcher: RankProcess) -> None:
    announce_rank_process({PROCESS_VARIABLE: str(launcher.fd)})
    assert launcher.new_report() is None
    progress = progress_of(launcher)
    progress.step()
    first = last(launcher)
    assert (first["steps"], first["samples"], first["values"]) == (1, 0, {})
    assert first["memory_bytes"] > 1 << 20
    assert launcher.new_report() is None
    progress.step()
    progress.report({"loss": 2, "norm": float("inf")}, 8)
    progress.close()
    found = last(launcher)
    assert (found["steps"], found["samples"], found["values"]) == (2, 8, {"loss": 2.0, "norm": "inf"})
    assert launcher.pid(os.getsid(0)) == os.getpid()


def test_ranks_with_parts_of_one_model_count_its_samples_once(launcher: RankProcess) -> None:
    progress = progress_of(launcher, counts=False)
    progress.report({}, 8)
    progress.close()
    assert last(launcher)["samples"] == 0


def test_samples_that_a_script_reports_beside_a_train_step_count_once(launcher: RankProcess) -> None:
    progress = progress_of(launcher)
    for _ in range(3):
        progress.report({"loss": 1.0}, 8, of_step=True)
        progress.report({"accuracy": 0.5}, 8)
    progress.close()
    assert last(launcher)["samples"] == 24


def test_a_report_that_is_half_written_is_passed_over(launcher: RankProcess) -> None:
    progress = progress_of(launcher)
    progress.step()
    os.pwrite(launcher.fd, b"!", 20)
    assert launcher.new_report() is None
    progress.close()
    assert last(launcher)["steps"] == 1


@pytest.mark.parametrize("value", ["low", [1.0, 2.0], None])
def test_a_value_that_is_no_number_is_refused_with_its_name(launcher: RankProcess, value: Any) -> None:
    progress = progress_of(launcher)
    with pytest.raises(UsageError, match=r"report\(loss=\.\.\.\) on rank 3: .* is not one number"):
        progress.report({"loss": value}, 0)
    with pytest.raises(UsageError, match="from 0"):
        progress.report({}, -1)
    with pytest.raises(UsageError, match="more than 16 names"):
        progress.report({f"value_{i}": 1.0 for i in range(17)}, 0)
    progress.close()


def test_without_a_launcher_nothing_is_written() -> None:
    assert ReportMemory.inherited({}) is None
    progress = ProgressReporter(0, None, Recorder(), counts_samples=lambda: True)
    progress.step()
    progress.report({"loss": 1.0}, 4)
    progress.close()
