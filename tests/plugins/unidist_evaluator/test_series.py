"""The finished checkpoints of a series: each once, in order, also those that are removed meanwhile."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from unidist.checkpoint.format import directory, index, readers
from unidist.errors import UsageError
from unidist_evaluator import CheckpointSeries, evaluations


def _save(series: Path, step: int, *, keep: int = 100) -> None:
    """Make a complete checkpoint as the job does: under another name, then renamed."""
    folder = directory.step_folder(series, step)
    made = directory.begin(folder)
    (made / index.NAME).write_text(str(step))
    directory.commit(folder)
    directory.prune(series, keep, step)


def test_what_is_there_and_then_the_end(tmp_path: Path) -> None:
    for step in (3, 10, 2):
        _save(tmp_path / "run", step)
    assert [each.step for each in evaluations(tmp_path / "run")] == [2, 3, 10]
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert list(evaluations(tmp_path / "runs" / "1")) == []


@pytest.mark.parametrize("name", ["run", "run[1]*"])
def test_a_slow_reader_gets_each_of_a_job_that_keeps_one(tmp_path: Path, name: str) -> None:
    series = tmp_path / name
    found = []
    with CheckpointSeries(series) as reading:

        def train() -> None:
            for step in range(1, 30):
                _save(series, step, keep=1)
                time.sleep(0.002)
            reading.end()

        thread = threading.Thread(target=train)
        thread.start()
        for each in reading:
            time.sleep(0.01)
            found.append((each.step, int((each.path / index.NAME).read_text())))
        thread.join()
    assert found == [(step, step) for step in range(1, 30)]
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_another_process_goes_on_for_a_reader(tmp_path: Path) -> None:
    series = tmp_path / "run"
    with CheckpointSeries(series, reader="a") as reading:
        _save(series, 1)
        for each in reading:
            assert each.step == 1
            break
    for step in (2, 3, 4):
        _save(series, step, keep=1)
    with CheckpointSeries(series, after=1, reader="a") as reading:
        reading.end()
        assert [each.step for each in reading] == [2, 3, 4]
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_reader_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    series = tmp_path / "run"
    folder = readers.reader_folder(series, "killed")
    folder.mkdir(parents=True)
    before = time.time() - 3600
    os.utime(folder, (before, before))
    for step in (1, 2):
        _save(series, step, keep=1)
    assert not folder.exists()


def test_without_hard_links_checkpoints_are_read_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object, **options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    series = tmp_path / "run"
    for step in (1, 2):
        _save(series, step)
    reading = CheckpointSeries(series)
    assert [each.path.parent for each in itertools.islice(reading, 2)] == [series, series]
    reading.end()
    reading.__exit__()


def test_one_checkpoint_is_no_series(tmp_path: Path) -> None:
    _save(tmp_path / "run", 1)
    with pytest.raises(UsageError, match=r"is one checkpoint; an evaluator reads a series"):
        CheckpointSeries(tmp_path / "run" / "step-00000001")
