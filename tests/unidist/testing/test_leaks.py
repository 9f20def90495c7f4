"""The leak check sees everything that a test could leave behind, and nothing else."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from unidist.testing import Resources, leaked_since
from unidist.testing.pools import PoolCache

SHORT = timedelta(seconds=0.05)


def check(before: Resources, expected: str, give_back: Callable[[], object]) -> None:
    leaks = leaked_since(before, grace=SHORT)
    assert any(expected in text for text in leaks), leaks
    give_back()
    assert leaked_since(before) == []


def test_a_thread_is_seen() -> None:
    before, end = Resources.held(), threading.Event()
    threading.Thread(target=end.wait, name="straggler").start()
    check(before, "thread 'straggler'", end.set)


def test_an_open_file_and_a_socket_are_seen(tmp_path: Path) -> None:
    before = Resources.held()
    file = open(tmp_path / "left", "w")  # noqa: SIM115 - it is to be left open
    check(before, str(tmp_path / "left"), file.close)
    connection = socket.socket()
    check(before, "socket:", connection.close)


def test_a_process_is_seen_also_when_nobody_waited_for_it() -> None:
    before = Resources.held()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    check(before, f"process {process.pid}", lambda: process.communicate(b"\n"))


def test_mapped_memory_without_a_name_is_seen_after_its_descriptor_is_closed() -> None:
    before = Resources.held()
    descriptor = os.memfd_create("unidist-test")
    os.ftruncate(descriptor, 4096)
    memory = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
    check(before, "/memfd:unidist-test", memory.close)


def test_a_file_in_shared_memory_is_seen() -> None:
    before, path = Resources.held(), Path(f"/dev/shm/unidist-test-{os.getpid()}")
    path.write_text("x")
    check(before, str(path), path.unlink)


def test_a_file_in_shared_memory_that_only_other_jobs_use_is_none() -> None:
    before, path = Resources.held(), Path(f"/dev/shm/unidist-test-{os.getpid()}")
    # In the background of a shell that has ended, a process is nobody's child here.
    line = f"{sys.executable} -c 'import sys, time; file = open(sys.argv[1], \"w\"); print(1); time.sleep(300)' {path}"
    started = subprocess.run(["sh", "-c", f"{line} >&2 & echo $!"], stdout=subprocess.PIPE, text=True, check=True)
    stranger = psutil.Process(int(started.stdout))
    try:
        deadline = time.monotonic() + 30
        while str(path) not in {file.path for file in stranger.open_files()}:  # which is later than that it exists
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert leaked_since(before, grace=SHORT) == []
        with path.open():
            assert any(str(path) in text for text in leaked_since(before, grace=SHORT))
    finally:
        stranger.kill()
        path.unlink(missing_ok=True)


def test_a_semaphore_of_python_counts_where_this_process_has_it_open() -> None:
    before, left = Resources.held(), Path(f"/dev/shm/sem.mp-{os.getpid()}")
    left.write_text("x")  # as by a job that was killed
    try:
        assert leaked_since(before, grace=SHORT) == []
        with left.open():
            assert any(str(left) in text for text in leaked_since(before, grace=SHORT))
    finally:
        left.unlink()


def test_new_changed_and_missing_variables_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_TEST_A", "1")
    before = Resources.held()
    os.environ["UNIDIST_TEST_B"] = "1"
    check(before, "UNIDIST_TEST_B='1'", lambda: os.environ.pop("UNIDIST_TEST_B"))
    os.environ["UNIDIST_TEST_A"] = "2"
    check(before, "UNIDIST_TEST_A='2'", lambda: os.environ.update(UNIDIST_TEST_A="1"))
    del os.environ["UNIDIST_TEST_A"]
    check(before, "UNIDIST_TEST_A is gone", lambda: os.environ.update(UNIDIST_TEST_A="1"))


def test_what_a_pool_cache_holds_can_be_told_from_leaks() -> None:
    before = Resources.held()
    with PoolCache() as cache:
        cache.get(1)
        assert leaked_since(before, grace=SHORT)
        assert leaked_since(before, allowed=cache.resources, grace=SHORT) == []
    assert leaked_since(before) == []
