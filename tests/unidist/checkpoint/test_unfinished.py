"""What processes that were killed left of checkpoints: the next save removes it, and nothing that is being written."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoint_states import piece

from unidist.checkpoint.format import directory
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.save_request import SaveOptions
from unidist.checkpoint.saving import Saver
from unidist.engines.single import SingleCommunicator


def save(series: Path, step: int) -> None:
    held = [piece("x", np.full(10, step, "float32"))]
    Saver(SingleCommunicator(), {}).save(SaveOptions(series, step), lambda: {"model": MemoryState(held)}, {})


def left(series: Path) -> list[str]:
    return sorted(child.name for child in series.iterdir() if child.name.startswith("."))


def die_while_saving(series: Path, step: int) -> None:
    """Save in another process, which is killed when the first file is complete."""
    pid = os.fork()
    if not pid:
        directory.commit = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        try:
            save(series, step)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_the_next_save_removes_what_killed_ones_have_left(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (2, 3, 4):
        die_while_saving(tmp_path, step)
    save(tmp_path, 5)
    assert left(tmp_path) == []
    assert [step for step, _ in directory.steps(tmp_path)] == [1, 5]


def test_a_save_leaves_alone_what_another_saver_of_the_process_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: set[Path] = set()
    first, second = (Saver(SingleCommunicator(), {}, unfinished=shared) for _ in range(2))
    reached, go_on = threading.Event(), threading.Event()
    commit = directory.commit

    def slow_commit(path: Path) -> None:
        if path.name.endswith("1"):
            reached.set()
            assert go_on.wait(60)
        commit(path)

    monkeypatch.setattr(directory, "commit", slow_commit)
    state = {"model": MemoryState([piece("x", np.ones(10, "float32"))])}
    handle = first.save(SaveOptions(tmp_path, 1, asynchronous=True), lambda: state, {})
    assert reached.wait(60)
    second.save(SaveOptions(tmp_path, 2), lambda: state, {})
    go_on.set()
    handle.wait()
    assert [step for step, _ in directory.steps(tmp_path)] == [1, 2]
    assert not shared
    first.close()
